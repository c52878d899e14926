// CPU row pass of `linear_divergence`: from logits of draft and verifier to the divergences and their gradient in the draft logits.
//
// The op's chunk loop (eagle3_fast/ops/_chunks.py) leaves the products to the libraries (_heads.py); here each verifier row is
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

// Returns the largest.
EVERY_INSTRUCTION_SET float widen(const uint16_t* bf16, float* out, int64_t n) {
  float result = -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(max : result)
  for (int64_t i = 0; i < n; ++i) {
    const float value = bits_as<float>(static_cast<uint32_t>(bf16[i]) << 16);
    out[i] = value;
    result = value > result ? value : result;
  }
  return result;
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

// powers = e^(t - shift); adds sum e^(t - shift), and sum e^(t - shift) (t - shift) over what does not vanish.
EVERY_INSTRUCTION_SET void exponentials(const float* t, float shift, float* powers, int64_t n, double& exps, double& mean) {
  float exp_part = 0, mean_part = 0;
#pragma omp simd reduction(+ : exp_part, mean_part)
  for (int64_t i = 0; i < n; ++i) {
    const float x = t[i] - shift, power = vector_exp(x);
    powers[i] = power;
    exp_part += power;
    mean_part += power > 0 ? power * x : 0.0f;
  }
  exps += exp_part;
  mean += mean_part;
}

// A probability from e^(x - largest). Zero instead of a denormal, by which the quotients below would overflow. Both distributions go
// through here: where they are equal, so are their probabilities, and the sign of their difference is not one of rounding.
ALWAYS_INLINE float probability(float power, float scale) {
  const float p = power * scale;
  return p < std::numeric_limits<float>::min() ? 0.0f : p;
}

EVERY_INSTRUCTION_SET void to_probabilities(float* powers, float scale, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) powers[i] = probability(powers[i], scale);
}

// powers = e^(z - shift), over z or elsewhere; adds sum e^(z - shift), and sum p (z - shift) where p > 0.
EVERY_INSTRUCTION_SET void exponentials_and_mean(
    const float* z, float shift, const float* p, float* powers, int64_t n, double& exps, double& mean) {
  float exp_part = 0, mean_part = 0;
#pragma omp simd reduction(+ : exp_part, mean_part)
  for (int64_t i = 0; i < n; ++i) {
    const float x = z[i] - shift, power = vector_exp(x);
    exp_part += power;
    mean_part += p[i] > 0 ? p[i] * x : 0.0f;
    powers[i] = power;
  }
  exps += exp_part;
  mean += mean_part;
}

EVERY_INSTRUCTION_SET void add_sums(
    const float* z, Normaliser norm, const float* q_powers, float scale, const float* t, Normaliser verifier_norm, const float* p,
    int64_t n, Sums& sums) {
  float overlap = 0, below = 0, reverse = 0, draft_mean = 0, verifier_mean = 0;
#pragma omp simd reduction(+ : overlap, below, reverse, draft_mean, verifier_mean)
  for (int64_t i = 0; i < n; ++i) {
    const float q = probability(q_powers[i], scale), log_q = log_softmax(z[i], norm), log_p = log_softmax(t[i], verifier_norm);
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
    const float q = probability(powers[i], scale);
    overlap += q < p[i] ? q : p[i];
    powers[i] = draft * q - verifier * p[i];
  }
  return overlap;
}

EVERY_INSTRUCTION_SET void full_gradient(
    float* z, Normaliser norm, const float* q_powers, float scale, const float* t, Normaliser verifier_norm, const float* p,
    Coefficients c, Sums sums, int64_t n) {
  const float below_sum = static_cast<float>(sums.below), kl_reverse = static_cast<float>(sums.reverse);
  const float draft_mean = static_cast<float>(sums.draft_mean);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float q = probability(q_powers[i], scale), log_q = log_softmax(z[i], norm), log_p = log_softmax(t[i], verifier_norm);
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

// Logits of a row as floats, their largest and the first place where it stands; place 0 in a row of NaN.
struct Logits {
  float* values;
  float largest;
  int64_t top1;
};

// `largest_of(at, n)`: the largest of values[at .. at + n].
template <typename Largest>
ALWAYS_INLINE Logits with_largest(float* values, int64_t size, const Largest& largest_of) {
  float best = -std::numeric_limits<float>::infinity();
  int64_t block = 0;
  in_blocks(size, [&](int64_t at, int64_t n) {
    const float value = largest_of(at, n);
    if (value > best) best = value, block = at;
  });
  float* end = values + std::min(block + kBlock, size);
  float* place = std::find(values + block, end, best);
  return {values, best, place == end ? 0 : place - values};
}

Logits with_largest(float* values, int64_t size) {
  return with_largest(values, size, [&](int64_t at, int64_t n) { return largest(values + at, n); });
}

VerifierRow verifier_row(const Logits& t, float* p, int64_t size) {
  double exps = 0, mean = 0;
  in_blocks(size, [&](int64_t at, int64_t n) { exponentials(t.values + at, t.largest, p + at, n, exps, mean); });
  const double log_exps = std::log(exps);
  in_blocks(size, [&](int64_t at, int64_t n) { to_probabilities(p + at, static_cast<float>(1 / exps), n); });
  return {t.values, p, {t.largest, static_cast<float>(log_exps)}, mean / exps - log_exps, t.top1};
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

// Scores draft logits against a verifier row and writes the gradient, times `row_weight`, over them, and to `rounded` where that is given.
// `powers` holds e^(z - largest) where logits are needed beside them; it is the logits' own place where they are not.
DraftRow draft_row(
    const Logits& draft, const VerifierRow& verifier, const float* weights, float row_weight, int64_t size, float* powers, float* terms,
    uint16_t* rounded) {
  float* z = draft.values;
  const bool full = powers != z;
  const float target = z[verifier.top1];
  double exps = 0, mean = 0;
  in_blocks(size, [&](int64_t at, int64_t n) {
    exponentials_and_mean(z + at, draft.largest, verifier.p + at, powers + at, n, exps, mean);
  });
  const float scale = static_cast<float>(1 / exps);
  const double log_exps = std::log(exps);
  const Normaliser norm{draft.largest, static_cast<float>(log_exps)};
  const float kl = static_cast<float>(std::max(0.0, verifier.negative_entropy - mean + log_exps));
  const float ce = -log_softmax(target, norm);
  Sums sums;
  // Zero, or NaN where a logit was: comparisons pass it over, and a broken row must not look like a perfect one.
  const double broken = 0.0 * (norm.log_sum + verifier.norm.log_sum);
  sums.overlap = sums.draft_mean = sums.reverse = broken;
  if (full)
    in_blocks(size, [&](int64_t at, int64_t n) {
      add_sums(z + at, norm, powers + at, scale, verifier.logits + at, verifier.norm, verifier.p + at, n, sums);
    });
  Coefficients c = coefficients(weights, sums);
  for (float* value : {&c.draft, &c.reverse, &c.mean, &c.below, &c.verifier, &c.best}) *value *= row_weight;
  in_blocks(size, [&](int64_t at, int64_t n) {
    if (full)
      full_gradient(z + at, norm, powers + at, scale, verifier.logits + at, verifier.norm, verifier.p + at, c, sums, n);
    else
      sums.overlap += simple_gradient(z + at, scale, verifier.p + at, c.draft, c.verifier, n);
    if (verifier.top1 >= at && verifier.top1 < at + n) z[verifier.top1] -= c.best;
    if (row_weight == 0) std::fill_n(z + at, n, 0.0f);  // what adds nothing may be broken
    if (rounded != nullptr) narrow(z + at, rounded + at, n);
  });
  write_terms(terms, kl + static_cast<float>(broken), ce, sums);
  return {norm.lse(), static_cast<float>(sums.overlap), draft.top1};
}

// --- the op ---------------------------------------------------------------------------------------------------------------------

// A matrix of logits, float or bfloat16.
struct Matrix {
  void* data;
  int64_t stride, size;
  bool wide;

  Matrix(const Tensor& logits)
      : data(logits.data_ptr()), stride(logits.stride(0)), size(logits.size(1)), wide(logits.scalar_type() == ScalarType::Float) {}
  uint16_t* rounded(int64_t row) const { return static_cast<uint16_t*>(data) + row * stride; }
  // What `as_floats` needs.
  std::vector<float> space() const { return std::vector<float>(wide ? 0 : size); }
  // The row itself, or a widened copy of it in `space`.
  Logits as_floats(int64_t row, std::vector<float>& space) const {
    if (wide) return with_largest(static_cast<float*>(data) + row * stride, size);
    return with_largest(space.data(), size, [&](int64_t at, int64_t n) { return widen(rounded(row) + at, space.data() + at, n); });
  }
};

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
  STD_TORCH_CHECK(
      z.scalar_type() == ScalarType::Float || z.scalar_type() == ScalarType::BFloat16, "row_divergence_: logits must be float32 or bfloat16");
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

  const Matrix draft(z), target(t);
  const int64_t size = draft.size;
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
    std::vector<float> p(size), target_space = target.space(), draft_space = draft.space(), powers(needs_sums(weights) ? size : 0);
    for (int64_t row = begin; row < end; ++row) {
      Logits logits = target.as_floats(row, target_space);
      if (softcap > 0) {
        cap(logits.values, centres[row], static_cast<float>(softcap), size);
        logits = with_largest(logits.values, size);  // logits that the cap made equal tie
      }
      const VerifierRow verifier = verifier_row(logits, p.data(), size);
      verifier_top1_out[row] = verifier.top1;
      verifier_lse_out[row] = verifier.norm.lse();
      for (int64_t m = starts[row]; m < starts[row + 1]; ++m) {
        uint16_t* rounded = draft.wide || !form_gradient ? nullptr : draft.rounded(m);
        const Logits scored = draft.as_floats(m, draft_space);
        const DraftRow result = draft_row(
            scored, verifier, weights, row_weights[m], size, powers.empty() ? scored.values : powers.data(), terms_out + m * kKinds,
            rounded);
        draft_top1_out[m] = result.top1;
        overlap_out[m] = result.overlap;
        draft_lse_out[m] = result.lse;
      }
    }
  });
}

// The first place of each row's largest entry.
void row_top1_(Tensor x, Tensor top1) {
  STD_TORCH_CHECK(
      x.scalar_type() == ScalarType::Float || x.scalar_type() == ScalarType::BFloat16, "row_top1_: logits must be float32 or bfloat16");
  STD_TORCH_CHECK(x.stride(1) == 1, "row_top1_: logits of a row must lie side by side");
  STD_TORCH_CHECK(
      top1.scalar_type() == ScalarType::Long && top1.is_contiguous() && top1.numel() == x.size(0), "row_top1_: top1 must be int64, one a row");
  const Matrix logits(x);
  auto* out = static_cast<int64_t*>(top1.data_ptr());
  torch::stable::parallel_for(0, x.size(0), 1, [&](int64_t begin, int64_t end) {
    std::vector<float> space = logits.space();
    for (int64_t row = begin; row < end; ++row) out[row] = logits.as_floats(row, space).top1;
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(eagle3_fast, CPU, library) {
  library.impl("row_divergence_", TORCH_BOX(&row_divergence_));
  library.impl("row_top1_", TORCH_BOX(&row_top1_));
}
