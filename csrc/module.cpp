// The package's C++ module, eagle3_fast._C. Importing it registers the CPU kernels of the ops that lie beside this file
// (PyTorch's stable ABI, so one build serves every supported Python and torch). The module itself holds nothing else.
#include <Python.h>

extern "C" PyObject* PyInit__C(void) {
  static struct PyModuleDef definition = {
      PyModuleDef_HEAD_INIT, "_C", "CPU kernels of eagle3_fast; importing registers them.", 0, nullptr,
      nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&definition);
}
