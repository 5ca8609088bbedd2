#include "optim/fused_step.hpp"

#include "base/log.hpp"
#include "base/page_size.hpp"
#include "comm/shared_memory.hpp"
#include "gradients/shared_exchange.hpp"
#include "gradients/tensor_changes.hpp"
#include "muster/error.hpp"
#include "node/finite.hpp"
#include "node/kernels.hpp"
#include "node/stream.hpp"
#include "optim/sum_of_squares.hpp"
#include "watch/trace.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <numeric>
#include <string>
#include <utility>

namespace muster::detail::optim {
namespace {

/// Number of averages that are computed at a time, so that they stay in the L1 cache.
constexpr std::size_t tile_elements = 2048;

constexpr const char* unfused = "an optimizer is not fused with the averaging of gradients";

std::size_t round_up(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }

/// Computes the averages of a chunk's gradients, one tile after the other.
template <class T>
class Averages {
 public:
  Averages(std::span<std::byte* const> gradients, double scale)
      : gradients_(gradients), sources_(gradients.size()), scale_(scale) {}

  /// Returns the averages of `count` elements from `first` on, at most one tile; valid until the next call.
  const T* of(std::size_t first, std::size_t count) {
    for (std::size_t r = 0; r < sources_.size(); ++r) sources_[r] = reinterpret_cast<const T*>(gradients_[r]) + first;
    void* const target = tile_;
    node::reduce_arrays(std::span(&target, 1), sources_, count,
                        {.type = sizeof(T) == 4 ? node::Dtype::f32 : node::Dtype::f64, .scale = scale_});
    return tile_;
  }

 private:
  std::span<std::byte* const> gradients_;
  std::vector<const void*> sources_;
  double scale_;
  alignas(64) T tile_[tile_elements];
};

/// Returns what chunk_results() holds of a chunk that is only checked: 0 if all averages are finite, else NaN.
double result_of(bool finite) { return finite ? 0 : std::numeric_limits<double>::quiet_NaN(); }

/// Returns the sum of squares of a chunk's averages. If `squares` is false, returns 0 if all are finite, else NaN.
template <class T>
double check_chunk(std::span<std::byte* const> gradients, std::size_t count, double scale, bool squares) {
  Averages<T> averages(gradients, scale);
  double sum = 0;
  for (std::size_t done = 0; done < count; done += tile_elements) {
    const auto n = std::min(tile_elements, count - done);
    const T* const tile = averages.of(done, n);
    sum += squares ? sum_of_squares(tile, n) : result_of(node::all_finite(tile, n));
  }
  return sum;
}

}  // namespace

/// The pages of one bucket for one kind of tensor (the parameters, the first moments, ...). Parameters of a bucket may
/// share a page, so private pages are dropped for all of them at once.
struct FusedStep::Pages {
  std::size_t first = 0, bytes = 0;  ///< offset and size in the shared copy
  bool changed = false;              ///< true if this rank has written to the pages of its view since the last step
};

/// A parameter and its state tensors. In each list, the parameter comes first.
struct FusedStep::Target {
  std::vector<std::byte*> shared[2] = {};  ///< addresses in each shared copy
  /// Tensors in this rank's view of each copy, which the module and the optimizer use.
  std::vector<at::Tensor> views[2] = {};
  // For the current step:
  std::vector<const std::byte*> from = {};  ///< addresses from which the step reads
  Rule rule = {};
  // Hashes of values that the program has written since the last step; 0 if it has written none.
  std::uint64_t seen = 0;     ///< at the last call of note_written()
  std::uint64_t noted = 0;    ///< of the values at all calls of note_written()
  std::uint64_t written = 0;  ///< `noted`, combined with what prepare() has found
};

FusedStep::Copy::Copy(std::shared_ptr<node::SharedSegment> shared, std::size_t bytes)
    : segment(std::move(shared)), view(segment->private_view(0, bytes)), dirty(view.get(), segment->data(), bytes) {}

FusedStep::~FusedStep() = default;

namespace {

/// Returns a copy of a tensor with the strides of `view`.
at::Tensor copy_like(const at::Tensor& view, const at::Tensor& values) {
  return at::empty_strided(view.sizes(), view.strides(), view.options()).copy_(values);
}

}  // namespace

/// Reserves this rank's part of the memory of a copy, which has `total` bytes: everything on one node; over several
/// nodes everything but the state.
void FusedStep::reserve(node::SharedSegment& segment, const Topology& topology,
                        const std::vector<std::vector<Pages>>& pages, std::size_t bytes, std::size_t total) {
  const auto rank = static_cast<std::size_t>(topology.local_rank);
  const auto ranks = static_cast<std::size_t>(topology.local_size);
  if (topology.num_nodes == 1) {
    const auto share = round_up((total + ranks - 1) / ranks, page_size());
    const auto first = std::min(total, share * rank);
    return segment.reserve(first, std::min(share, total - first));
  }
  for (std::size_t b = rank; b < pages.size(); b += ranks) segment.reserve(pages[b][0].first, pages[b][0].bytes);
  if (rank == 0) segment.reserve(bytes, total - bytes);
}

/// Returns the chunks of state of which this rank updates its node's share.
std::vector<ScatteredState::Chunk> FusedStep::own_state(const gradients::SharedExchange& gradients,
                                                        const std::vector<at::Tensor>& parameters,
                                                        const std::vector<std::vector<Pages>>& pages) {
  std::vector<ScatteredState::Chunk> state;
  for (const auto& chunk : gradients.own_chunks()) {
    const auto& first = parameters[gradients.layout().buckets[chunk.bucket].members.front()];
    for (std::size_t kind = 1; kind < pages[chunk.bucket].size(); ++kind)
      state.push_back({pages[chunk.bucket][kind].first + chunk.first * first.element_size(), chunk.count,
                       first.scalar_type() == at::kFloat ? node::Dtype::f32 : node::Dtype::f64});
  }
  return state;
}

bool FusedStep::fits(const std::vector<at::Tensor>& parameters) {
  return std::all_of(parameters.begin(), parameters.end(), [](const at::Tensor& p) {
    return (p.scalar_type() == at::kFloat || p.scalar_type() == at::kDouble) && p.is_non_overlapping_and_dense() &&
           !p.is_neg() && p.numel() > 0;
  });
}

std::unique_ptr<FusedStep> FusedStep::make(gradients::SharedExchange& gradients, std::vector<at::Tensor> parameters,
                                           int states, bool with_second_copy) {
  // The layout: for each bucket, separate pages for the parameters and for each kind of state; at the end,
  // chunk_results().
  std::vector<std::vector<Pages>> pages;
  std::size_t bytes = 0;
  for (const auto& [members, count] : gradients.layout().buckets) {
    const auto of_kind = round_up(count * parameters[members.front()].element_size(), page_size());
    auto& kinds = pages.emplace_back();
    for (int kind = 0; kind <= states; ++kind) kinds.push_back({std::exchange(bytes, bytes + of_kind), of_kind});
  }
  const auto& communicator = gradients.communicator();
  const bool over_nodes = communicator.topology().num_nodes > 1;
  std::unique_ptr<ScatteredState> scattered;
  std::vector<std::unique_ptr<Copy>> copies;
  for (const auto total : {bytes + gradients.chunk_count() * sizeof(double), bytes}) {
    if (copies.size() == 1 && (!with_second_copy || over_nodes)) break;
    if (const auto segment = comm::map_segment(communicator, total, 0, unfused)) {
      std::unique_ptr<Copy> copy;
      std::string problem;
      try {
        if (over_nodes) {
          scattered = std::make_unique<ScatteredState>(communicator, segment, own_state(gradients, parameters, pages));
          scattered->reserve_shares();
        }
        reserve(*segment, communicator.topology(), pages, bytes, total);
        copy = std::make_unique<Copy>(segment, bytes);
        // Without it, all of the state would be read to find what was written, and so take memory.
        if (over_nodes && !copy->dirty.finds_all()) problem = "/proc/self/pagemap cannot be used";
      } catch (const Error& error) {
        problem = error.what();
      }
      const auto problems = communicator.all_gather(problem);
      const auto first = std::ranges::find_if_not(problems, &std::string::empty);
      if (first == problems.end())
        copies.push_back(std::move(copy));
      else if (communicator.rank() == 0)
        log::warn(str("rank ", first - problems.begin(), ": ", *first, ". Until then ", unfused, "."));
    }
    if (copies.empty()) return nullptr;
  }
  return std::unique_ptr<FusedStep>(new FusedStep(gradients, std::move(parameters), states, std::move(copies),
                                                  std::move(pages), bytes, std::move(scattered)));
}

FusedStep::FusedStep(gradients::SharedExchange& gradients, std::vector<at::Tensor> parameters, int states,
                     std::vector<std::unique_ptr<Copy>> copies, std::vector<std::vector<Pages>> pages,
                     std::size_t bytes, std::unique_ptr<ScatteredState> scattered)
    : gradients_(&gradients),
      parameters_(std::move(parameters)),
      states_(states),
      copies_(std::move(copies)),
      bytes_(bytes),
      pages_(std::move(pages)),
      scattered_(std::move(scattered)) {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const auto& parameter = parameters_[i];
    const auto& slice = gradients.layout().slices[i];
    auto& target = targets_.emplace_back();
    for (std::size_t c = 0; c < copies_.size(); ++c)
      for (const auto& pages : pages_[slice.bucket]) {
        const auto offset = pages.first + slice.first_element * parameter.element_size();
        const auto& view = copies_[c]->view;
        target.shared[c].push_back(copies_[c]->segment->data() + offset);
        target.views[c].push_back(at::from_blob(
            view.get() + offset, parameter.sizes(), gradients.strides(i), [view](void*) {},
            parameter.options().requires_grad(false)));
      }
    // All ranks have equal values, so the first rank of the node copies its values into the shared copy.
    if (gradients.communicator().topology().local_rank == 0) {
      const auto& view = target.views[0][0];
      const auto values = parameter.strides() == view.strides() ? parameter.detach() : copy_like(view, parameter);
      std::memcpy(target.shared[0][0], values.const_data_ptr(), values.nbytes());
    }
  }
  gradients.communicator().barrier();
  show();
}

std::vector<FusedStep::Pages>& FusedStep::pages_of(std::size_t parameter) {
  return pages_[gradients_->layout().slices[parameter].bucket];
}

/// Drops this rank's private pages in the current view, after a step has taken their values into the shared copy.
void FusedStep::drop_changed() {
  for (auto& kinds : pages_)
    for (auto& pages : kinds)
      if (std::exchange(pages.changed, false) || !current().dirty.finds_all())
        node::SharedSegment::drop_private_pages(current().view.get() + pages.first, pages.bytes);
}

/// Makes the module's parameters show the current shared copy.
void FusedStep::show() {
  drop_changed();
  for (std::size_t i = 0; i < targets_.size(); ++i) {
    auto& parameter = parameters_[i];
    const auto& view = targets_[i].views[current_][0];
    if (parameter.const_data_ptr() != view.const_data_ptr()) parameter.set_data(view);
    torch::autograd::impl::bump_version(parameter);
  }
}

/// True if a step may read the tensor's values in place: it has the strides of `view` and no negative bit, and it does
/// not lie in the part of a view that belongs to another tensor, which the same step overwrites.
bool FusedStep::can_be_read_in_place(const at::Tensor& tensor, const at::Tensor& view) const {
  if (tensor.strides() != view.strides() || tensor.is_neg()) return false;
  const auto* const data = static_cast<const std::byte*>(tensor.const_data_ptr());
  return data == view.const_data_ptr() || std::ranges::none_of(copies_, [&](const auto& copy) {
           return data >= copy->view.get() && data < copy->view.get() + bytes_;
         });
}

/// Finds what the program has changed since the last step: parameters with other memory, and written pages of the view.
void FusedStep::find_changes() {
  for (auto& kinds : pages_)
    for (auto& pages : kinds) pages.changed = current().dirty.any_written(pages.first, pages.bytes);
  for (std::size_t i = 0; i < targets_.size(); ++i) {
    auto& target = targets_[i];
    auto& parameter = parameters_[i];
    const auto& view = target.views[current_][0];
    const auto& shared = target.shared[current_];
    // The copy has the strides of the view, and so of the shared copy and of the gradients in the exchange.
    if (!can_be_read_in_place(parameter, view)) parameter.set_data(copy_like(view, parameter));
    target.from.assign(shared.begin(), shared.end());
    target.from[0] = static_cast<const std::byte*>(parameter.const_data_ptr());
    if (target.from[0] != view.const_data_ptr()) pages_of(i)[0].changed = true;
  }
}

std::optional<MemorySnapshot> FusedStep::take_snapshot() {
  if (copies_.size() == 1) return {};
  const bool untouched = !current().dirty.any_written(0, bytes_);
  if (gradients_->communicator().all_reduce(std::int64_t{untouched}, ReduceOp::min) == 0) return {};
  snapshot_held_ = true;
  const auto& segment = current().segment;
  return MemorySnapshot{current().view.get(), bytes_, {segment, segment->data()}};
}

void FusedStep::switch_copies(torch::optim::Optimizer& optimizer) {
  drop_changed();
  std::map<const void*, at::Tensor> views;
  for (auto& target : targets_)
    for (std::size_t s = 1; s < target.views[current_].size(); ++s)
      views.emplace(target.views[current_][s].unsafeGetTensorImpl(), target.views[next()][s]);
  current_ = next();
  snapshot_held_ = false;
  // The program may have kept a tensor since this copy was last the current one, and may have written to it meanwhile.
  if (!current().dirty.finds_all() || current().dirty.any_written(0, bytes_))
    node::SharedSegment::drop_private_pages(current().view.get(), bytes_);
  replace_state(optimizer, [&](const at::Tensor& state) {
    const auto found = views.find(state.unsafeGetTensorImpl());
    return found == views.end() ? state : found->second;
  });
}

/// Returns a hash of the 4 KB pieces of `values` that differ from the shared copy, because the program has written to
/// `values`; 0 if none differs. The nodes' copies of scattered state differ, so all of its pieces are hashed.
std::uint64_t FusedStep::hash_of_written(std::size_t parameter, std::size_t kind, const void* values) const {
  constexpr std::size_t piece = 4096;
  const auto bytes = parameters_[parameter].nbytes();
  const auto* const now = static_cast<const std::byte*>(values);
  const auto* const before = targets_[parameter].shared[current_][kind];
  const bool all = kind > 0 && scattered_ && !scattered_->is_whole();
  std::uint64_t hash = 0;
  for (std::size_t at = 0; at < bytes; at += piece) {
    const auto n = std::min(piece, bytes - at);
    if (all || std::memcmp(now + at, before + at, n) != 0) hash = gradients::hash_of(now + at, n, hash + at);
  }
  return hash;
}

void FusedStep::note_written() {
  const at::NoGradGuard no_grad;
  std::vector<bool> written;
  for (const auto& kinds : pages_) written.push_back(current().dirty.any_written(kinds[0].first, kinds[0].bytes));
  for (std::size_t i = 0; i < targets_.size(); ++i) {
    const auto& view = targets_[i].views[current_][0];
    auto now = parameters_[i].detach();
    if (now.const_data_ptr() == view.const_data_ptr() && !written[gradients_->layout().slices[i].bucket]) continue;
    if (now.strides() != view.strides() || now.is_neg()) now = copy_like(view, now);
    // Values that have not changed since the last call are not added again: ranks may differ in their number of calls.
    auto& target = targets_[i];
    const auto hash = hash_of_written(i, 0, now.const_data_ptr());
    if (hash != 0 && hash != target.seen) target.noted = gradients::hash_of(&hash, sizeof hash, target.noted);
    target.seen = hash;
  }
}

std::uint32_t FusedStep::prepare(torch::optim::Optimizer& optimizer) {
  const at::NoGradGuard no_grad;
  if (is_writing_)
    throw Error(ExitCode::user_error, "stepping an optimizer that is fused with the averaging of gradients",
                "an exception has ended its last step, which may have written a part of the parameters",
                "Let the exception end the training function; the run resumes from its checkpoint");
  auto rules = next_rules(optimizer, parameters_);
  find_changes();
  std::uint64_t of_all = 0;
  for (std::size_t i = 0; i < targets_.size(); ++i) {
    auto& target = targets_[i];
    target.rule = std::move(rules[i]);
    for (std::size_t s = 0; s < target.rule.state_tensors.size(); ++s) {
      auto& state = target.rule.state_tensors[s];
      const auto& like = target.views[current_][1 + s];
      if (state.is_same(like) && !pages_of(i)[1 + s].changed) continue;
      if (!state.is_cpu() || state.scalar_type() != like.scalar_type() || !can_be_read_in_place(state, like))
        state = copy_like(like, state);
      target.from[1 + s] = static_cast<const std::byte*>(state.const_data_ptr());
    }
    target.written = target.noted;
    for (std::size_t t = 0; t <= target.rule.state_tensors.size(); ++t)
      if (t == 0 ? pages_of(i)[0].changed : target.from[t] != target.shared[current_][t])
        if (const auto hash = hash_of_written(i, t, target.from[t]); hash != 0)
          target.written = gradients::hash_of(&hash, sizeof hash, target.written + t);
    of_all = of_all * 31 + hash_of(target.rule) + target.written;
  }
  return static_cast<std::uint32_t>(of_all ^ of_all >> 32);
}

void FusedStep::clear_notes() noexcept {
  for (auto& target : targets_) target.noted = target.seen = 0;
}

FusedStep::Difference FusedStep::difference() const {
  std::string mine;
  for (const auto& target : targets_)
    for (const auto hash : {target.written, hash_of(target.rule)})
      mine.append(reinterpret_cast<const char*>(&hash), sizeof hash);
  const auto of_ranks = gradients_->communicator().all_gather(mine);
  std::size_t first = mine.size();
  for (const auto& other : of_ranks)
    first = std::min<std::size_t>(first, std::ranges::mismatch(other, of_ranks[0]).in1 - other.begin());
  return {first / (2 * sizeof(std::uint64_t)), first / sizeof(std::uint64_t) % 2 == 0};
}

FusedStep::StepResult FusedStep::step(torch::optim::Optimizer& optimizer, double max_norm, NumberCheck check) {
  const at::NoGradGuard no_grad;
  StepResult stepped;
  const bool scales = max_norm > 0,
             checks_first = scales || check == NumberCheck::before_step || check == NumberCheck::without_step;
  if (checks_first) {
    const double sum = check_averages(scales);
    stepped.ranks_differ = differs();
    if (scales) stepped.norm = std::sqrt(sum);
    stepped.has_bad_number = check != NumberCheck::none && !std::isfinite(sum);
    // If a rank has abandoned the averaging, it only takes part in this first reduction, so no second one may follow.
    if (abandoned() || stepped.ranks_differ || stepped.has_bad_number || check == NumberCheck::without_step)
      return stepped;
  }
  const bool checks = check == NumberCheck::during_step && !checks_first;
  if (scales) stepped.scale = std::min(max_norm / (stepped.norm + 1e-6), 1.0);
  const double scale = stepped.scale / gradients_->divisor();
  is_writing_ = true;
  gradients_->finish_with(
      {.on_chunk =
           [&](const node::BucketReduction::Chunk& chunk, std::span<std::byte* const> gradients) {
             if (differs()) return;
             const watch::TraceSpan span("reduce bucket and update", static_cast<std::int64_t>(chunk.bucket));
             const bool finite = is_float(chunk.bucket) ? step_chunk<float>(chunk, gradients, scale, checks)
                                                        : step_chunk<double>(chunk, gradients, scale, checks);
             if (checks) chunk_results()[chunk.number] = result_of(finite);
           },
       .result = [&](const node::BucketReduction::Chunk& chunk) -> std::shared_ptr<std::byte> {
         if (differs()) return nullptr;
         const auto& segment = copies_[next()]->segment;
         const auto element = is_float(chunk.bucket) ? sizeof(float) : sizeof(double);
         return {segment, segment->data() + pages_[chunk.bucket][0].first + chunk.first * element};
       }});
  // A rank that has abandoned the averaging averages its chunks but neither steps nor copies them. So the step is
  // dropped: values that the program has written stay in the view until the next step.
  stepped.ranks_differ = differs();
  if (abandoned() || stepped.ranks_differ) {
    is_writing_ = false;
    return stepped;
  }
  stepped.has_bad_number = checks && !std::isfinite(sum_of_results());
  for (std::size_t i = 0; i < targets_.size(); ++i)
    if (gradients_->user_count(i) > 0)
      record_step(optimizer, parameters_[i], targets_[i].rule, std::span(targets_[i].views[next()]).subspan(1));
  if (snapshot_held_) switch_copies(optimizer);
  show();
  if (scattered_) scattered_->note_step();
  is_writing_ = false;
  return stepped;
}

/// True if the ranks would take different steps, or if a gradient was changed by hand after backward(). Then no rank
/// writes anything.
bool FusedStep::differs() const {
  return !gradients_->all_words_equal() || (gradients_->flags() & gradients::gradients_changed) != 0;
}

bool FusedStep::abandoned() const {
  for (std::size_t i = 0; i < targets_.size(); ++i)
    if (gradients_->user_count(i) < 0) return true;
  return false;
}

void FusedStep::gather_state() {
  if (scattered_) scattered_->gather();
}

void FusedStep::release(torch::optim::Optimizer& optimizer) {
  gather_state();
  const auto* const begin = current().view.get();
  replace_state(optimizer, [&](const at::Tensor& state) {
    const auto* const data = static_cast<const std::byte*>(state.const_data_ptr());
    return data >= begin && data < begin + bytes_ ? state.clone() : state;
  });
}

std::span<double> FusedStep::chunk_results() const {
  return {reinterpret_cast<double*>(copies_[0]->segment->data() + bytes_), gradients_->chunk_count()};
}

/// Adds in the order of chunks, and of nodes, so that every rank gets the same bits.
double FusedStep::sum_of_results() const {
  const double here = std::accumulate(chunk_results().begin(), chunk_results().end(), 0.0);
  const auto& communicator = gradients_->communicator();
  if (!scattered_) return here;
  return communicator.all_reduce(communicator.topology().local_rank == 0 ? here : 0.0);
}

/// Returns the sum of squares of all averages. If `squares` is false, returns 0 if all averages are finite, else NaN.
/// The result is of no use if a rank has abandoned the averaging.
double FusedStep::check_averages(bool squares) {
  const double scale = 1.0 / gradients_->divisor();
  gradients_->finish_with(
      {.on_chunk = [&](const node::BucketReduction::Chunk& chunk, std::span<std::byte* const> gradients) {
        const watch::TraceSpan span("reduce bucket", static_cast<std::int64_t>(chunk.bucket));
        chunk_results()[chunk.number] = is_float(chunk.bucket)
                                            ? check_chunk<float>(gradients, chunk.count, scale, squares)
                                            : check_chunk<double>(gradients, chunk.count, scale, squares);
      }});
  return abandoned() || differs() ? 0 : sum_of_results();
}

bool FusedStep::is_float(std::size_t bucket) const {
  return parameters_[gradients_->layout().buckets[bucket].members.front()].scalar_type() == at::kFloat;
}

/// Steps the parameters of a chunk. With `check`, returns false if an average of a stepped parameter is not finite.
template <class T>
bool FusedStep::step_chunk(const node::BucketReduction::Chunk& chunk, std::span<std::byte* const> gradients,
                           double scale, bool check) {
  bool finite = true;
  Averages<T> averages(gradients, scale);
  alignas(64) T written[3][tile_elements];  // results, before they are written to the other copy past the caches
  const auto& pages = pages_[chunk.bucket];
  for (const auto i : gradients_->layout().buckets[chunk.bucket].members) {
    const auto& slice = gradients_->layout().slices[i];
    const auto begin = std::max(chunk.first, slice.first_element);
    const auto end = std::min(chunk.first + chunk.count, slice.first_element + slice.element_count);
    if (begin >= end) continue;
    const auto& target = targets_[i];
    const auto first = begin - slice.first_element, count = end - begin;
    const bool steps = gradients_->user_count(i) > 0;
    // Copy the tensors that the rule does not write. That is needed if they were changed, since their pages are dropped
    // together with their neighbours' pages, and always if the step writes the other copy.
    for (std::size_t t = steps ? 1 + state_tensor_count(target.rule) : 0; t < pages.size(); ++t) {
      if (!pages[t].changed && !snapshot_held_) continue;
      const auto* const from =
          t == 0 ? target.from[0] : static_cast<const std::byte*>(target.views[current_][t].const_data_ptr());
      std::memcpy(target.shared[next()][t] + first * sizeof(T), from + first * sizeof(T), count * sizeof(T));
    }
    if (!steps) continue;
    const auto& shared = target.shared[next()];
    const auto states = state_tensor_count(target.rule);
    for (std::size_t done = 0; done < count; done += tile_elements) {
      const auto n = std::min(tile_elements, count - done), at = first + done;
      const auto to = [&](std::size_t t) { return reinterpret_cast<T*>(shared[t]) + at; };
      const auto from = [&](std::size_t t) { return reinterpret_cast<const T*>(target.from[t]) + at; };
      const auto write = [&](std::size_t t) { return snapshot_held_ ? written[t] : to(t); };
      Tile<T> tile{.gradient = averages.of(begin - chunk.first + done, n), .from = from(0), .to = write(0), .count = n};
      if (check) finite = node::all_finite(tile.gradient, n) && finite;
      for (std::size_t t = 1; t < shared.size(); ++t) {
        tile.state_from[t - 1] = from(t);
        tile.state_to[t - 1] = write(t);
      }
      std::visit([&](const auto& rule) { update(rule, tile); }, target.rule.rule);
      for (std::size_t t = 0; snapshot_held_ && t <= states; ++t)
        node::stream_copy(reinterpret_cast<std::byte*>(to(t)), reinterpret_cast<const std::byte*>(written[t]),
                          n * sizeof(T));
    }
  }
  if (snapshot_held_) node::stream_fence();
  return finite;
}

}  // namespace muster::detail::optim
