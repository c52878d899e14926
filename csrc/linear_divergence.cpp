// CPU row pass of `linear_divergence`: from logits of draft and verifier to the divergences and their gradient in the draft logits.
//
// The op's chunk loop (eagle3_fast/ops/linear_divergence.py) does the products with the library's GEMMs; here each verifier row is
// normalised once and serves all draft rows scored against it, and the gradient is written over the draft logits. A row is swept in
// blocks that stay in the first cache; sums of a block are floats, sums of blocks doubles. Formulas: eagle3_fast/reference.
//
// Every divergence here has, in the draft logit z_i, a gradient of one form (q, p: probabilities, m = (p + q) / 2):
//
//     q_i (draft + reverse (log q_i - log p_i - KL(q | p)) + mean (sum q log(1 + p / q) - log(1 + p_i / q_i))
//          + below (sum of q where q <= p - [q_i <= p_i])) - verifier p_i - best [i = argmax p]
//
// so a weighted sum of divergences costs one sweep, whatever it is made of. It is log q_i - log m_i = log 2 - log(1 + p_i / q_i), in the
// form that keeps its digits where q_i dominates.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "vector_math.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

enum Kind { kKlDiv, kRkl, kJsd, kCe, kTv, kNla, kLkHybrid, kKinds };  // the order of the contract's KINDS

constexpr int64_t kBlock = 2048;
constexpr float kOverlapFloor = 1e-5f;
constexpr float kHybridSharpness = 3.0f;
constexpr float kLog2 = 0.693147181f;  // as a float, like the sums it is compared with

// log softmax of x is (x - largest) - log_sum: two steps, because their sum is rounded to more than a logit's last digit.
struct Normaliser {
  float largest;
  float log_sum;
  float lse() const { return largest + log_sum; }
};
ALWAYS_INLINE float log_softmax(float x, Normaliser norm) { return (x - norm.largest) - norm.log_sum; }

// A row of verifier logits and what follows from it.
struct VerifierRow {
  const float* logits;
  const float* p;
  Normaliser norm;
  double negative_entropy;  // sum p log p
  int64_t top1;
};

// Sums over the vocabulary that some divergences' gradients need before they can be formed.
struct Sums {
  double overlap = 0;       // sum min(p, q)
  double below = 0;         // sum of q where q <= p
  double reverse = 0;       // KL(q | p)
  double draft_mean = 0;     // sum q log(1 + p / q) = log 2 - KL(q | m)
  double verifier_mean = 0;  // sum p log(1 + q / p) = log 2 - KL(p | m)
};

// Coefficients of the gradient's one form, see above.
struct Coefficients {
  float draft = 0, reverse = 0, mean = 0, below = 0, verifier = 0, best = 0;
};

// --- sweeps over one block ------------------------------------------------------------------------------------------------------

EVERY_INSTRUCTION_SET void widen(const uint16_t* bf16, float* out, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) out[i] = bits_as<float>(static_cast<uint32_t>(bf16[i]) << 16);
}

// Round to nearest, ties to even; NaN stays NaN, because a gradient that is not finite must be seen.
EVERY_INSTRUCTION_SET void narrow(const float* values, uint16_t* bf16, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = bits_as<uint32_t>(values[i]);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    bf16[i] = static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
  }
}

EVERY_INSTRUCTION_SET float largest(const float* x, int64_t n) {
  float result = -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(max : result)
  for (int64_t i = 0; i < n; ++i) result = x[i] > result ? x[i] : result;
  return result;
}

// sum e^(x - shift)
EVERY_INSTRUCTION_SET float exp_sum(const float* x, float shift, int64_t n) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += vector_exp(x[i] - shift);
  return sum;
}

// p = softmax(t); returns sum p log p
EVERY_INSTRUCTION_SET float normalise(const float* t, Normaliser norm, float* p, int64_t n) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) {
    const float log_p = log_softmax(t[i], norm), probability = vector_exp(log_p);
    p[i] = probability;
    sum += probability > 0 ? probability * log_p : 0.0f;
  }
  return sum;
}

// sum e^(z - shift), and sum p (z - shift) where p > 0. `keep`: the exponentials stay where the logits were.
EVERY_INSTRUCTION_SET void exp_sum_and_mean(float* z, float shift, const float* p, bool keep, int64_t n, double& exps, double& mean) {
  float exp_part = 0, mean_part = 0;
#pragma omp simd reduction(+ : exp_part, mean_part)
  for (int64_t i = 0; i < n; ++i) {
    const float x = z[i] - shift, power = vector_exp(x);
    exp_part += power;
    mean_part += p[i] > 0 ? p[i] * x : 0.0f;
    z[i] = keep ? power : z[i];
  }
  exps += exp_part;
  mean += mean_part;
}

EVERY_INSTRUCTION_SET void add_sums(
    const float* z, Normaliser norm, const float* t, Normaliser verifier_norm, const float* p, int64_t n, Sums& sums) {
  float overlap = 0, below = 0, reverse = 0, draft_mean = 0, verifier_mean = 0;
#pragma omp simd reduction(+ : overlap, below, reverse, draft_mean, verifier_mean)
  for (int64_t i = 0; i < n; ++i) {
    const float log_q = log_softmax(z[i], norm), q = vector_exp(log_q), log_p = log_softmax(t[i], verifier_norm);
    overlap += q < p[i] ? q : p[i];
    below += q <= p[i] ? q : 0.0f;
    reverse += q > 0 ? q * (log_q - log_p) : 0.0f;
    draft_mean += q > 0 ? q * vector_log1p(p[i] / q) : 0.0f;
    verifier_mean += p[i] > 0 ? p[i] * vector_log1p(q / p[i]) : 0.0f;
  }
  sums.overlap += overlap;
  sums.below += below;
  sums.reverse += reverse;
  sums.draft_mean += draft_mean;
  sums.verifier_mean += verifier_mean;
}

// The gradient over e^(z - largest), `scale` times which is q, where no sums are needed; returns sum min(p, q).
EVERY_INSTRUCTION_SET float simple_gradient(float* powers, float scale, const float* p, float draft, float verifier, int64_t n) {
  float overlap = 0;
#pragma omp simd reduction(+ : overlap)
  for (int64_t i = 0; i < n; ++i) {
    const float q = powers[i] * scale;
    overlap += q < p[i] ? q : p[i];
    powers[i] = draft * q - verifier * p[i];
  }
  return overlap;
}

EVERY_INSTRUCTION_SET void full_gradient(
    float* z, Normaliser norm, const float* t, Normaliser verifier_norm, const float* p, Coefficients c, Sums sums, int64_t n) {
  const float below_sum = static_cast<float>(sums.below), kl_reverse = static_cast<float>(sums.reverse);
  const float draft_mean = static_cast<float>(sums.draft_mean);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float log_q = log_softmax(z[i], norm), q = vector_exp(log_q), log_p = log_softmax(t[i], verifier_norm);
    const float reverse = c.reverse != 0 ? c.reverse * (log_q - log_p - kl_reverse) : 0.0f;
    const float mean = c.mean != 0 ? c.mean * (draft_mean - vector_log1p(p[i] / q)) : 0.0f;
    const float inner = c.draft + reverse + mean + c.below * (below_sum - (q <= p[i] ? 1.0f : 0.0f));
    z[i] = (q > 0 ? q * inner : 0.0f) - c.verifier * p[i];
  }
}

// --- one row --------------------------------------------------------------------------------------------------------------------

template <typename Sweep>
ALWAYS_INLINE void in_blocks(int64_t size, const Sweep& sweep) {
  for (int64_t at = 0; at < size; at += kBlock) sweep(at, std::min(kBlock, size - at));
}

// The largest entry and the first place where it stands; place 0 in a row of NaN.
std::pair<float, int64_t> first_largest(const float* x, int64_t size) {
  float best = -std::numeric_limits<float>::infinity();
  int64_t block = 0;
  in_blocks(size, [&](int64_t at, int64_t n) {
    const float value = largest(x + at, n);
    if (value > best) best = value, block = at;
  });
  const int64_t end = std::min(block + kBlock, size);
  const float* place = std::find(x + block, x + end, best);
  return {best, place == x + end ? 0 : place - x};
}

VerifierRow verifier_row(const float* t, float* p, int64_t size) {
  const auto [best, top1] = first_largest(t, size);
  double exps = 0, negative_entropy = 0;
  in_blocks(size, [&, best = best](int64_t at, int64_t n) { exps += exp_sum(t + at, best, n); });
  const Normaliser norm{best, static_cast<float>(std::log(exps))};
  in_blocks(size, [&](int64_t at, int64_t n) { negative_entropy += normalise(t + at, norm, p + at, n); });
  return {t, p, norm, negative_entropy, top1};
}

bool needs_sums(const float* weights) {
  return weights[kRkl] != 0 || weights[kJsd] != 0 || weights[kTv] != 0 || weights[kNla] != 0 || weights[kLkHybrid] != 0;
}

float hybrid_share(double overlap) { return static_cast<float>(std::exp(-kHybridSharpness * overlap)); }

Coefficients coefficients(const float* weights, const Sums& sums) {
  Coefficients c;
  const float overlap = static_cast<float>(sums.overlap), share = hybrid_share(sums.overlap);
  const float total_variation = weights[kTv] + (overlap >= kOverlapFloor ? weights[kNla] / overlap : 0.0f) +
      weights[kLkHybrid] * (1 - share);
  c.verifier = weights[kKlDiv] + weights[kLkHybrid] * share;
  c.best = weights[kCe];
  c.reverse = std::isinf(sums.reverse) ? 0 : weights[kRkl];  // infinite: reported, and no direction to go
  c.mean = 0.5f * weights[kJsd];
  c.below = total_variation;
  c.draft = c.verifier + c.best;
  return c;
}

void write_terms(float* terms, float kl, float ce, const Sums& sums) {
  const float overlap = static_cast<float>(sums.overlap), share = hybrid_share(sums.overlap);
  terms[kKlDiv] = kl;
  terms[kRkl] = static_cast<float>(sums.reverse);
  const float jsd = static_cast<float>(kLog2 - 0.5 * (sums.verifier_mean + sums.draft_mean));
  terms[kJsd] = jsd < 0 ? 0 : jsd;
  terms[kCe] = ce;
  terms[kTv] = 1 - overlap;
  terms[kNla] = -std::log(overlap < kOverlapFloor ? kOverlapFloor : overlap);
  terms[kLkHybrid] = share * kl + (1 - share) * (1 - overlap);
}

struct DraftRow {
  float lse, overlap;
  int64_t top1;
};

// Scores the draft logits z against a verifier row and writes the gradient, times `row_weight`, over them.
DraftRow draft_row(float* z, const VerifierRow& verifier, const float* weights, float row_weight, int64_t size, float* terms) {
  const auto [best, top1] = first_largest(z, size);
  const bool full = needs_sums(weights);
  const float target = z[verifier.top1];
  double exps = 0, mean = 0;
  in_blocks(size, [&, best = best](int64_t at, int64_t n) { exp_sum_and_mean(z + at, best, verifier.p + at, !full, n, exps, mean); });
  const double log_exps = std::log(exps);
  const Normaliser norm{best, static_cast<float>(log_exps)};
  const float kl = static_cast<float>(std::max(0.0, verifier.negative_entropy - mean + log_exps));
  const float ce = -log_softmax(target, norm);
  Sums sums;
  // Zero, or NaN where a logit was: comparisons pass it over, and a broken row must not look like a perfect one.
  const double broken = 0.0 * (norm.log_sum + verifier.norm.log_sum);
  sums.overlap = sums.draft_mean = sums.reverse = broken;
  if (full)
    in_blocks(size, [&](int64_t at, int64_t n) { add_sums(z + at, norm, verifier.logits + at, verifier.norm, verifier.p + at, n, sums); });
  Coefficients c = coefficients(weights, sums);
  for (float* value : {&c.draft, &c.reverse, &c.mean, &c.below, &c.verifier, &c.best}) *value *= row_weight;
  const float scale = static_cast<float>(1 / exps);
  in_blocks(size, [&](int64_t at, int64_t n) {
    if (full)
      full_gradient(z + at, norm, verifier.logits + at, verifier.norm, verifier.p + at, c, sums, n);
    else
      sums.overlap += simple_gradient(z + at, scale, verifier.p + at, c.draft, c.verifier, n);
  });
  z[verifier.top1] -= c.best;
  write_terms(terms, kl + static_cast<float>(broken), ce, sums);
  return {norm.lse(), static_cast<float>(sums.overlap), top1};
}

// --- the op ---------------------------------------------------------------------------------------------------------------------

// A row as floats: the row itself, or a widened copy of it in `space`.
float* as_floats(void* data, bool wide, int64_t row, int64_t stride, int64_t size, std::vector<float>& space) {
  if (wide) return static_cast<float*>(data) + row * stride;
  widen(static_cast<uint16_t*>(data) + row * stride, space.data(), size);
  return space.data();
}

void cap(float* t, float centre, float softcap, int64_t size) {
  constexpr float masked = -std::numeric_limits<float>::infinity();
  for (int64_t i = 0; i < size; ++i) t[i] = t[i] == masked ? masked : softcap * std::tanh((t[i] + centre) / softcap);
}

void check(const Tensor& tensor, ScalarType dtype, int64_t size, const char* name) {
  STD_TORCH_CHECK(
      tensor.scalar_type() == dtype && tensor.is_contiguous() && tensor.numel() == size,
      "row_divergence_: ", name, " has another dtype, stride or size");
}

void row_divergence_(
    Tensor z, Tensor t, Tensor first, Tensor row_weight, Tensor kind_weights, Tensor verifier_centre, double softcap, bool form_gradient,
    Tensor terms,
    Tensor draft_top1, Tensor verifier_top1, Tensor overlap, Tensor draft_lse, Tensor verifier_lse) {
  const bool wide = z.scalar_type() == ScalarType::Float;
  STD_TORCH_CHECK(wide || z.scalar_type() == ScalarType::BFloat16, "row_divergence_: logits must be float32 or bfloat16");
  STD_TORCH_CHECK(t.scalar_type() == z.scalar_type() && t.size(1) == z.size(1), "row_divergence_: logits of two kinds");
  STD_TORCH_CHECK(z.stride(1) == 1 && t.stride(1) == 1, "row_divergence_: logits of a row must lie side by side");
  const int64_t drafts = z.size(0), targets = t.size(0);
  check(first, ScalarType::Int, targets + 1, "first");
  check(kind_weights, ScalarType::Float, kKinds, "kind_weights");
  check(terms, ScalarType::Float, drafts * kKinds, "terms");
  for (const Tensor* tensor : {&row_weight, &overlap, &draft_lse}) check(*tensor, ScalarType::Float, drafts, "a draft row's number");
  for (const Tensor* tensor : {&verifier_centre, &verifier_lse}) check(*tensor, ScalarType::Float, targets, "a verifier row's number");
  check(draft_top1, ScalarType::Long, drafts, "draft_top1");
  check(verifier_top1, ScalarType::Long, targets, "verifier_top1");

  const int64_t size = z.size(1), z_stride = z.stride(0), t_stride = t.stride(0);
  void *z_data = z.data_ptr(), *t_data = t.data_ptr();
  const auto* starts = static_cast<const int32_t*>(first.data_ptr());
  const auto* weights = static_cast<const float*>(kind_weights.data_ptr());
  const auto* row_weights = static_cast<const float*>(row_weight.data_ptr());
  const auto* centres = static_cast<const float*>(verifier_centre.data_ptr());
  STD_TORCH_CHECK(starts[0] == 0 && starts[targets] == drafts && std::is_sorted(starts, starts + targets + 1),
      "row_divergence_: first must ascend from 0 to the number of draft rows");
  auto* terms_out = static_cast<float*>(terms.data_ptr());
  auto* draft_top1_out = static_cast<int64_t*>(draft_top1.data_ptr());
  auto* verifier_top1_out = static_cast<int64_t*>(verifier_top1.data_ptr());
  auto* overlap_out = static_cast<float*>(overlap.data_ptr());
  auto* draft_lse_out = static_cast<float*>(draft_lse.data_ptr());
  auto* verifier_lse_out = static_cast<float*>(verifier_lse.data_ptr());

  torch::stable::parallel_for(0, targets, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> p(size), t_space(wide ? 0 : size), z_space(wide ? 0 : size);
    for (int64_t row = begin; row < end; ++row) {
      float* logits = as_floats(t_data, wide, row, t_stride, size, t_space);
      if (softcap > 0) cap(logits, centres[row], static_cast<float>(softcap), size);
      const VerifierRow verifier = verifier_row(logits, p.data(), size);
      verifier_top1_out[row] = verifier.top1;
      verifier_lse_out[row] = verifier.norm.lse();
      for (int64_t m = starts[row]; m < starts[row + 1]; ++m) {
        float* draft = as_floats(z_data, wide, m, z_stride, size, z_space);
        const DraftRow result = draft_row(draft, verifier, weights, row_weights[m], size, terms_out + m * kKinds);
        if (!wide && form_gradient) narrow(draft, static_cast<uint16_t*>(z_data) + m * z_stride, size);
        draft_top1_out[m] = result.top1;
        overlap_out[m] = result.overlap;
        draft_lse_out[m] = result.lse;
      }
    }
  });
}

// The first place of each row's largest entry.
void row_top1_(Tensor x, Tensor top1) {
  const bool wide = x.scalar_type() == ScalarType::Float;
  STD_TORCH_CHECK(wide || x.scalar_type() == ScalarType::BFloat16, "row_top1_: logits must be float32 or bfloat16");
  STD_TORCH_CHECK(x.stride(1) == 1, "row_top1_: logits of a row must lie side by side");
  STD_TORCH_CHECK(
      top1.scalar_type() == ScalarType::Long && top1.is_contiguous() && top1.numel() == x.size(0), "row_top1_: top1 must be int64, one a row");
  const int64_t size = x.size(1), stride = x.stride(0);
  void* data = x.data_ptr();
  auto* out = static_cast<int64_t*>(top1.data_ptr());
  torch::stable::parallel_for(0, x.size(0), 1, [&](int64_t begin, int64_t end) {
    std::vector<float> space(wide ? 0 : size);
    for (int64_t row = begin; row < end; ++row) out[row] = first_largest(as_floats(data, wide, row, stride, size, space), size).second;
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(eagle3_fast, CPU, library) {
  library.impl("row_divergence_", TORCH_BOX(&row_divergence_));
  library.impl("row_top1_", TORCH_BOX(&row_top1_));
}
