#include "data/preprocess/apply.hpp"

#include "muster/error.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>

#include <mutex>
#include <optional>
#include <string>
#include <utility>

namespace muster {
namespace {

/// A preprocessor that is tried on a thread that reads ahead.
struct AheadAttempt {
  const Preprocessor& preprocessor;
  bool takes_no_generator = false;
};
thread_local AheadAttempt* attempt = nullptr;
/// The one whose transform(Batch&) is called in the place of the other.
thread_local const Preprocessor* without_generator = nullptr;

/// Gives a variable another value while it lives.
template <class T>
class Setting {
 public:
  Setting(T& variable, T value) : variable_(variable), before_(std::exchange(variable, value)) {}
  Setting(const Setting&) = delete;
  Setting& operator=(const Setting&) = delete;
  ~Setting() { variable_ = before_; }

 private:
  T& variable_;
  T before_;
};

/// While it lives, torch's default generator of the CPU goes on from the state of `generator`, which then has its
/// state.
class LentGenerator {
 public:
  explicit LentGenerator(at::Generator& generator)
      : to_(generator), default_(at::globalContext().defaultGenerator(at::kCPU)), before_(state_of(default_)) {
    set_state(default_, state_of(to_));
  }
  LentGenerator(const LentGenerator&) = delete;
  LentGenerator& operator=(const LentGenerator&) = delete;
  ~LentGenerator() {
    set_state(to_, state_of(default_));
    set_state(default_, before_);
  }

 private:
  static at::Tensor state_of(at::Generator& generator) {
    const std::lock_guard lock(generator.mutex());
    return generator.get_state();
  }
  static void set_state(at::Generator& generator, const at::Tensor& state) {
    const std::lock_guard lock(generator.mutex());
    generator.set_state(state);
  }

  at::Generator& to_;
  at::Generator default_;
  at::Tensor before_;
};

std::int64_t rows_of(const at::Tensor& column) { return column.defined() && column.dim() > 0 ? column.size(0) : 0; }

/// The rows of the batch before a preprocessor, and whether it has as many afterwards.
class RowCount {
 public:
  explicit RowCount(const Batch& batch) : rows_(batch.num_columns() > 0 ? rows_of(batch.begin()->second) : 0) {}

  void require_same(const Batch& batch) const {
    if (batch.num_columns() == 0) refuse(0, "");
    for (const auto& [name, tensor] : batch)
      if (rows_of(tensor) != rows_) refuse(rows_of(tensor), ", in column \"" + name + "\"");
  }

 private:
  [[noreturn]] void refuse(std::int64_t after, const std::string& where) const {
    throw Error(
        ExitCode::data, "applying a preprocessor",
        "the batch has " + std::to_string(rows_) + " rows before it and " + std::to_string(after) + " after it" + where,
        "Weights, steps and positions count the samples of the dataset: leave samples out of that, not of a "
        "batch");
  }

  std::int64_t rows_;
};

}  // namespace

void Preprocessor::transform(Batch& batch, at::Generator& generator) const {
  if (attempt != nullptr) {
    if (&attempt->preprocessor != this)
      throw Error(ExitCode::usage, "applying a preprocessor",
                  "it hands its generator to another one, which takes none, on a thread that reads ahead",
                  "Override transform(Batch&, at::Generator&) of the other one, or call its transform(Batch&)");
    attempt->takes_no_generator = true;
    return;
  }
  const Setting<const Preprocessor*> setting(without_generator, this);
  const LentGenerator lent(generator);
  transform(batch);
}

void Preprocessor::transform(Batch& batch) const {
  if (without_generator == this)
    throw Error(ExitCode::usage, "applying a preprocessor", "its class overrides no transform()",
                "Override transform(Batch&, at::Generator&)");
  auto generator = detail::data::make_generator(0);
  transform(batch, generator);
}

namespace detail::data {

at::Generator make_generator(std::uint64_t seed) { return at::make_generator<at::CPUGeneratorImpl>(seed); }

void apply(const Preprocessor& preprocessor, Batch& batch, at::Generator& generator) {
  const RowCount rows(batch);
  preprocessor.transform(batch, generator);
  rows.require_same(batch);
}

bool try_apply_ahead(const Preprocessor& preprocessor, Batch& batch, at::Generator& generator) {
  const RowCount rows(batch);
  AheadAttempt mine{preprocessor};
  {
    const Setting<AheadAttempt*> trying(attempt, &mine);
    preprocessor.transform(batch, generator);
  }
  if (mine.takes_no_generator) return false;
  rows.require_same(batch);
  return true;
}

}  // namespace detail::data
}  // namespace muster
