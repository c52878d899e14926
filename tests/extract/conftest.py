import torch

torch.set_num_threads(1)  # these models are far too small to share among cores
