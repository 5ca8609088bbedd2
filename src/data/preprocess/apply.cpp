#include "data/preprocess/apply.hpp"

#include "base/text.hpp"
#include "muster/error.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>

#include <mutex>
#include <optional>
#include <string>
#include <utility>

namespace muster {
namespace {

/// An attempt to apply a preprocessor on a thread that reads ahead.
struct AheadAttempt {
  const Preprocessor& preprocessor;
  bool takes_no_generator = false;
};
thread_local AheadAttempt* attempt = nullptr;
/// The preprocessor whose transform(Batch&) is being called because it does not override the one with a generator.
thread_local const Preprocessor* without_generator = nullptr;

/// Sets a variable for a scope; the destructor restores the earlier value.
template <class T>
class ScopedValue {
 public:
  ScopedValue(T& variable, T value) : variable_(variable), before_(std::exchange(variable, value)) {}
  ScopedValue(const ScopedValue&) = delete;
  ScopedValue& operator=(const ScopedValue&) = delete;
  ~ScopedValue() { variable_ = before_; }

 private:
  T& variable_;
  T before_;
};

/// For a scope, torch's default CPU generator takes the state of `generator`. At the end `generator` gets the state
/// that the default one has reached, and the default one gets back its own.
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

/// Checks that the number of rows of a batch does not change. Construct it before the batch is changed.
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
        ExitCode::data, "applying a preprocessor or a function of map_batches()",
        detail::str("the batch has ", rows_, " rows before it and ", after, " after it", where),
        "Leave samples out of the dataset, not of a batch: weights, steps and positions count the dataset's samples");
  }

  std::int64_t rows_;
};

}  // namespace

void Preprocessor::transform(Batch& batch, at::Generator& generator) const {
  if (attempt != nullptr) {
    if (&attempt->preprocessor != this)
      throw Error(ExitCode::usage, "applying a preprocessor",
                  "on a thread that reads ahead, it passes its generator to another preprocessor that takes none",
                  "Override transform(Batch&, at::Generator&) of the other one, or call its transform(Batch&)");
    attempt->takes_no_generator = true;
    return;
  }
  const ScopedValue<const Preprocessor*> calling(without_generator, this);
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

void apply(const BatchFunction::WithGenerator& function, Batch& batch, at::Generator& generator) {
  const RowCount rows(batch);
  function(batch, generator);
  rows.require_same(batch);
}

void apply(const BatchFunction::Plain& function, Batch& batch, at::Generator&) {
  const RowCount rows(batch);
  function(batch);
  rows.require_same(batch);
}

bool try_apply_ahead(const Preprocessor& preprocessor, Batch& batch, at::Generator& generator) {
  const RowCount rows(batch);
  AheadAttempt mine{preprocessor};
  {
    const ScopedValue<AheadAttempt*> trying(attempt, &mine);
    preprocessor.transform(batch, generator);
  }
  if (mine.takes_no_generator) return false;
  rows.require_same(batch);
  return true;
}

}  // namespace detail::data
}  // namespace muster
