#include "node/team.hpp"

#include "node/sizes.hpp"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

namespace muster::detail::node {
namespace {

/// Up to this many bytes a copy costs less than asking whether one is needed.
constexpr std::size_t small_bytes = std::size_t{8} << 10;
/// Above this many bytes, all ranks together, it is cheaper that each rank reduces a slice than that each reduces all.
constexpr std::size_t direct_bytes = std::size_t{1} << 20;
/// In registered memory of up to so many bytes a rank has always the same slice, which stays in its cache.
constexpr std::size_t cached_bytes = std::size_t{2} << 20;

/// Both slots of all ranks together take about 8 MB.
std::size_t slot_bytes_of(int size) {
  const auto share = (std::size_t{4} << 20) / static_cast<std::size_t>(size);
  return std::clamp(share / page * page, std::size_t{16} << 10, std::size_t{256} << 10);
}

std::size_t round_up(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

/// The beginning of the shared memory; zeroes are its valid first state.
struct Team::Shared {
  /// Where a rank's data lie: the number of the region from 1, 0 for none, and the offset in the rank's part.
  struct Offer {
    std::uint64_t region = 0;
    std::uint64_t offset = 0;
  };
  struct Rank {
    alignas(line) std::atomic<std::uint64_t> arrived;
    alignas(line) std::atomic<std::uint64_t> finished;
    alignas(line) Offer offers[2];
  };
  /// The step in the upper half, the next part in the lower, so that nothing has to be reset.
  alignas(line) std::atomic<std::uint64_t> claimed;
  Rank ranks[1];  // [size]

  static std::size_t bytes(int size) {
    return round_up(sizeof(Shared) + sizeof(Rank) * static_cast<std::size_t>(size - 1), page);
  }
};

namespace {

/// The piece of an owner's slice that begins at `first` in it, or what is left.
Team::Slice piece_of(const Team::Slice& whole, std::size_t first, std::size_t count) {
  const auto begin = std::min(first, whole.count);
  return {whole.first + begin, std::min(count, whole.count - begin)};
}

}  // namespace

class Team::Operation {
 public:
  Operation() = default;
  Operation(std::byte* data, std::size_t bytes) : data_(data), bytes_(bytes) {}
  virtual ~Operation() = default;
  /// Goes on as far as that is possible without waiting; true at the end.
  virtual bool advance(Team& team) = 0;

  Start start = Start::open;

  /// Goes on in memory of its own. Registered memory stays, as other ranks may write there.
  void leave_data(const Team& team) {
    if (bytes_ == 0 || own_ || team.registered(data_, bytes_)) return;
    own_ = std::make_unique_for_overwrite<std::byte[]>(bytes_);
    std::memcpy(own_.get(), data_, bytes_);
    data_ = own_.get();
  }

 protected:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;

 private:
  std::unique_ptr<std::byte[]> own_;
};

/// One step of a copying operation: a rank enters when everybody has left the step before the last, whose slot it
/// takes over.
struct Team::Step {
  std::uint64_t number = 0;
  bool entered = false;

  bool enter(Team& team) {
    if (entered) return true;
    if (number == 0) number = team.next_step();
    entered = team.all_arrived(number - 1);
    return entered;
  }
};

class Team::Barrier final : public Operation {
 public:
  bool advance(Team& team) override {
    if (!step_.entered) {
      if (!step_.enter(team)) return false;
      team.arrive(step_.number);
    }
    return team.all_arrived(step_.number);
  }

 private:
  Step step_;
};

class Team::Broadcast final : public Operation {
 public:
  Broadcast(std::byte* data, std::size_t bytes, int root) : Operation(data, bytes), root_(root) {}

  bool advance(Team& team) override {
    while (first_ < bytes_) {
      const auto n = std::min(bytes_ - first_, team.slot_bytes_);
      if (!step_.entered) {
        if (!step_.enter(team)) return false;
        if (team.rank_ == root_) std::memcpy(team.slot(root_, step_.number), data_ + first_, n);
        team.arrive(step_.number);
      }
      if (team.rank_ != root_) {
        if (!team.arrived(root_, step_.number)) return false;
        std::memcpy(data_ + first_, team.slot(root_, step_.number), n);
      }
      first_ += n;
      step_ = {};
    }
    return true;
  }

 private:
  int root_;
  std::size_t first_ = 0;
  Step step_;
};

class Team::Reduce final : public Operation {
 public:
  Reduce(std::byte* data, std::size_t count, const Reduction& reduction, int root)
      : Operation(data, count * size_of(reduction.type)), count_(count), reduction_(reduction), root_(root) {}

  bool advance(Team& team) override {
    const auto element = size_of(reduction_.type);
    while (first_ < count_) {
      const auto n = std::min(count_ - first_, team.slot_bytes_ / element);
      std::byte* here = data_ + first_ * element;
      if (!step_.entered) {
        if (!step_.enter(team)) return false;
        if (team.rank_ != root_) std::memcpy(team.slot(team.rank_, step_.number), here, n * element);
        team.arrive(step_.number);
      }
      if (team.rank_ == root_) {
        if (!team.all_arrived(step_.number)) return false;
        std::vector<const void*> sources;
        for (int r = 0; r < team.size_; ++r) sources.push_back(r == root_ ? here : team.slot(r, step_.number));
        void* const target = here;
        reduce_arrays(std::span(&target, 1), sources, n, reduction_);
      }
      first_ += n;
      step_ = {};
    }
    return true;
  }

 private:
  std::size_t count_;
  Reduction reduction_;
  int root_;
  std::size_t first_ = 0;
  Step step_;
};

class Team::AllReduce final : public Operation {
 public:
  AllReduce(Team& team, std::byte* data, std::size_t count, const Reduction& reduction)
      : Operation(data, count * size_of(reduction.type)),
        count_(count),
        reduction_(reduction),
        element_(size_of(reduction.type)),
        sources_(static_cast<std::size_t>(team.size_)),
        state_(count * element_ <= small_bytes ? State::direct : State::offering) {}

  bool advance(Team& team) override {
    switch (state_) {
      case State::direct:
        return direct(team);
      case State::offering:
        if (!step_.enter(team)) return false;
        team.offer(step_.number, data_, count_ * element_);
        team.arrive(step_.number);
        state_ = State::agreeing;
        [[fallthrough]];
      case State::agreeing: {
        if (!team.all_arrived(step_.number)) return false;
        if (!team.accept_offers(step_.number, everywhere_)) {
          step_ = {};
          const bool is_short = count_ * element_ * static_cast<std::size_t>(team.size_) <= direct_bytes;
          state_ = is_short ? State::direct : State::sliced;
          return advance(team);
        }
        state_ = State::in_place;
      }
        [[fallthrough]];
      case State::in_place:
        if (count_ * element_ <= cached_bytes)
          reduce_in_place(slice(count_, team.size_, team.rank_, reduction_.type));
        else if (claim(team))
          return false;
        team.finish(step_.number);
        state_ = State::finishing;
        [[fallthrough]];
      case State::finishing:
        return team.all_finished(step_.number);
      case State::sliced:
        return sliced(team);
    }
    return true;
  }

 private:
  enum class State { direct, offering, agreeing, in_place, finishing, sliced };

  /// Everybody reduces everything.
  bool direct(Team& team) {
    while (first_ < count_) {
      const auto n = std::min(count_ - first_, team.slot_bytes_ / element_);
      void* const here = data_ + first_ * element_;
      if (!step_.entered) {
        if (!step_.enter(team)) return false;
        std::memcpy(team.slot(team.rank_, step_.number), here, n * element_);
        team.arrive(step_.number);
      }
      if (!team.all_arrived(step_.number)) return false;
      for (int r = 0; r < team.size_; ++r) sources_[static_cast<std::size_t>(r)] = team.slot(r, step_.number);
      reduce_arrays(std::span(&here, 1), sources_, n, reduction_);
      first_ += n;
      step_ = {};
    }
    return true;
  }

  /// Of each chunk everybody reduces a slice, which the others fetch.
  bool sliced(Team& team) {
    while (first_ < count_) {
      const auto n = std::min(count_ - first_, team.slot_bytes_ / element_);
      const auto mine = slice(n, team.size_, team.rank_, reduction_.type);
      std::byte* const here = data_ + first_ * element_;
      if (!step_.entered) {
        if (!step_.enter(team)) return false;
        std::byte* const slot = team.slot(team.rank_, step_.number);
        const auto before = mine.first * element_, after = (mine.first + mine.count) * element_;
        std::memcpy(slot, here, before);
        std::memcpy(slot + after, here + after, n * element_ - after);
        team.arrive(step_.number);
      }
      if (!reduced_) {
        if (!team.all_arrived(step_.number)) return false;
        const auto at = mine.first * element_;
        for (int r = 0; r < team.size_; ++r)
          sources_[static_cast<std::size_t>(r)] = (r == team.rank_ ? here : team.slot(r, step_.number)) + at;
        void* const targets[] = {here + at, team.slot(team.rank_, step_.number) + at};
        reduce_arrays(targets, sources_, mine.count, reduction_);
        team.finish(step_.number);
        reduced_ = true;
      }
      if (!team.all_finished(step_.number)) return false;
      for (int r = 0; r < team.size_; ++r) {
        if (r == team.rank_) continue;
        const auto theirs = slice(n, team.size_, r, reduction_.type);
        std::memcpy(here + theirs.first * element_, team.slot(r, step_.number) + theirs.first * element_,
                    theirs.count * element_);
      }
      first_ += n;
      step_ = {};
      reduced_ = false;
    }
    return true;
  }

  /// Reduces the next part that nobody has claimed; false when none is left.
  bool claim(Team& team) {
    const auto part = part_bytes / element_;
    const auto parts = (count_ + part - 1) / part;
    const auto next = team.claim(step_.number, parts);
    if (next == parts) return false;
    const auto first = next * part;
    reduce_in_place({first, std::min(part, count_ - first)});
    return true;
  }

  void reduce_in_place(const Slice& part) {
    std::vector<void*> targets;
    for (std::size_t r = 0; r < everywhere_.size(); ++r) {
      targets.push_back(everywhere_[r] + part.first * element_);
      sources_[r] = targets.back();
    }
    reduce_arrays(targets, sources_, part.count, reduction_);
  }

  std::size_t count_;
  Reduction reduction_;
  std::size_t element_;
  std::vector<const void*> sources_;  // [size]
  std::vector<std::byte*> everywhere_ = {};
  State state_;
  Step step_ = {};
  std::size_t first_ = 0;
  bool reduced_ = false;
};

class Team::ReduceScatter final : public Operation {
 public:
  ReduceScatter(Team& team, std::byte* data, std::size_t count, int owners, const Reduction& reduction)
      : Operation(data, count * size_of(reduction.type)),
        count_(count),
        owners_(owners),
        reduction_(reduction),
        element_(size_of(reduction.type)),
        longest_(slice(count, owners, 0, reduction.type).count),
        sources_(static_cast<std::size_t>(team.size_)) {}

  bool advance(Team& team) override {
    if (team.size_ == 1) return true;
    if (!agreed_) {
      if (!step_.entered) {
        if (!step_.enter(team)) return false;
        team.offer(step_.number, data_, count_ * element_);
        team.arrive(step_.number);
      }
      if (!team.all_arrived(step_.number)) return false;
      agreed_ = true;
      if (team.accept_offers(step_.number, everywhere_)) {
        if (team.rank_ < owners_) {
          const auto mine = slice(count_, owners_, team.rank_, reduction_.type);
          for (std::size_t r = 0; r < sources_.size(); ++r) sources_[r] = everywhere_[r] + mine.first * element_;
          void* const target = data_ + mine.first * element_;
          reduce_arrays(std::span(&target, 1), sources_, mine.count, reduction_);
        }
        first_ = longest_;
      }
      step_ = {};
    }
    // A chunk is a piece of every slice, side by side in the slot.
    while (first_ < longest_) {
      const auto most = team.slot_bytes_ / static_cast<std::size_t>(owners_) / line * line / element_;
      const auto piece = std::min(longest_ - first_, std::max<std::size_t>(1, most));
      if (!step_.entered) {
        if (!step_.enter(team)) return false;
        for (int o = 0; o < owners_; ++o) {
          if (o == team.rank_) continue;
          const auto part = piece_of(slice(count_, owners_, o, reduction_.type), first_, piece);
          std::memcpy(team.slot(team.rank_, step_.number) + static_cast<std::size_t>(o) * piece * element_,
                      data_ + part.first * element_, part.count * element_);
        }
        team.arrive(step_.number);
      }
      if (team.rank_ < owners_) {
        if (!team.all_arrived(step_.number)) return false;
        const auto mine = piece_of(slice(count_, owners_, team.rank_, reduction_.type), first_, piece);
        void* const here = data_ + mine.first * element_;
        for (int r = 0; r < team.size_; ++r)
          sources_[static_cast<std::size_t>(r)] =
              r == team.rank_ ? here
                              : team.slot(r, step_.number) + static_cast<std::size_t>(team.rank_) * piece * element_;
        reduce_arrays(std::span(&here, 1), sources_, mine.count, reduction_);
      }
      first_ += piece;
      step_ = {};
    }
    return true;
  }

 private:
  std::size_t count_;
  int owners_;
  Reduction reduction_;
  std::size_t element_;
  std::size_t longest_;  ///< elements of the longest slice
  std::vector<const void*> sources_;
  std::vector<std::byte*> everywhere_ = {};
  bool agreed_ = false;
  std::size_t first_ = 0;  ///< in every slice
  Step step_ = {};
};

class Team::AllGather final : public Operation {
 public:
  AllGather(std::byte* data, std::size_t count, int owners, Dtype type)
      : Operation(data, count * size_of(type)),
        count_(count),
        owners_(owners),
        type_(type),
        element_(size_of(type)),
        longest_(slice(count, owners, 0, type).count) {}

  bool advance(Team& team) override {
    if (team.size_ == 1) return true;
    if (!agreed_) {
      if (!step_.entered) {
        if (!step_.enter(team)) return false;
        team.offer(step_.number, data_, count_ * element_);
        team.arrive(step_.number);
      }
      if (!team.all_arrived(step_.number)) return false;
      agreed_ = true;
      if (team.accept_offers(step_.number, everywhere_)) {
        if (team.rank_ < owners_) {
          const auto mine = slice(count_, owners_, team.rank_, type_);
          const auto at = mine.first * element_;
          for (int r = 0; r < team.size_; ++r)
            if (r != team.rank_)
              std::memcpy(everywhere_[static_cast<std::size_t>(r)] + at, data_ + at, mine.count * element_);
        }
        team.finish(step_.number);
        first_ = longest_;
      } else {
        step_ = {};
      }
    }
    if (!everywhere_.empty()) return team.all_finished(step_.number);
    while (first_ < longest_) {
      const auto piece = std::min(longest_ - first_, team.slot_bytes_ / element_);
      if (!step_.entered) {
        if (!step_.enter(team)) return false;
        if (team.rank_ < owners_) {
          const auto mine = piece_of(slice(count_, owners_, team.rank_, type_), first_, piece);
          std::memcpy(team.slot(team.rank_, step_.number), data_ + mine.first * element_, mine.count * element_);
        }
        team.arrive(step_.number);
      }
      if (!team.all_arrived(step_.number)) return false;
      for (int o = 0; o < owners_; ++o) {
        if (o == team.rank_) continue;
        const auto part = piece_of(slice(count_, owners_, o, type_), first_, piece);
        std::memcpy(data_ + part.first * element_, team.slot(o, step_.number), part.count * element_);
      }
      first_ += piece;
      step_ = {};
    }
    return true;
  }

 private:
  std::size_t count_;
  int owners_;
  Dtype type_;
  std::size_t element_;
  std::size_t longest_;
  std::vector<std::byte*> everywhere_ = {};
  bool agreed_ = false;
  std::size_t first_ = 0;
  Step step_ = {};
};

std::size_t Team::memory(int size) {
  return Shared::bytes(size) + 2 * slot_bytes_of(size) * static_cast<std::size_t>(size);
}

Team::Team(std::byte* memory, int rank, int size)
    : shared_(reinterpret_cast<Shared*>(memory)),
      rank_(rank),
      size_(size),
      slot_bytes_(slot_bytes_of(size)),
      slots_(memory + Shared::bytes(size)) {}

Team::~Team() = default;

void Team::add(Region region) { regions_.push_back(std::move(region)); }

Team::Ticket Team::start(std::unique_ptr<Operation> operation, Start start) {
  operation->start = start;
  queue_.push_back(std::move(operation));
  ++started_;
  advance();
  return started_;
}

void Team::advance() {
  while (!queue_.empty() && queue_.front()->start == Start::open && queue_.front()->advance(*this)) {
    queue_.pop_front();
    ++finished_;
  }
}

void Team::open(Ticket ticket) {
  queue_[ticket - finished_ - 1]->start = Start::open;
  advance();
}

void Team::leave(Ticket ticket) {
  if (finished_ < ticket) queue_[ticket - finished_ - 1]->leave_data(*this);
}

bool Team::done(Ticket ticket) {
  if (finished_ < ticket) advance();
  return finished_ >= ticket;
}

Team::Ticket Team::barrier() { return start(std::make_unique<Barrier>()); }

Team::Ticket Team::broadcast(void* data, std::size_t bytes, int root) {
  return start(std::make_unique<Broadcast>(static_cast<std::byte*>(data), bytes, root));
}

Team::Ticket Team::all_reduce(void* data, std::size_t count, const Reduction& reduction) {
  return start(std::make_unique<AllReduce>(*this, static_cast<std::byte*>(data), count, reduction));
}

Team::Ticket Team::reduce(void* data, std::size_t count, const Reduction& reduction, int root) {
  return start(std::make_unique<Reduce>(static_cast<std::byte*>(data), count, reduction, root));
}

Team::Ticket Team::reduce_scatter(void* data, std::size_t count, int owners, const Reduction& reduction) {
  return start(std::make_unique<ReduceScatter>(*this, static_cast<std::byte*>(data), count, owners, reduction));
}

Team::Ticket Team::all_gather(void* data, std::size_t count, int owners, Dtype type, Start when) {
  return start(std::make_unique<AllGather>(static_cast<std::byte*>(data), count, owners, type), when);
}

Team::Slice Team::slice(std::size_t count, int owners, int owner, Dtype type) {
  const auto unit = std::max<std::size_t>(1, line / size_of(type));
  const auto units = (count + unit - 1) / unit;
  const auto each = (units + static_cast<std::size_t>(owners) - 1) / static_cast<std::size_t>(owners) * unit;
  const auto first = std::min(count, each * static_cast<std::size_t>(owner));
  return {first, std::min(each, count - first)};
}

void Team::arrive(std::uint64_t step) { shared_->ranks[rank_].arrived.store(step, std::memory_order_release); }

void Team::finish(std::uint64_t step) { shared_->ranks[rank_].finished.store(step, std::memory_order_release); }

bool Team::arrived(int rank, std::uint64_t step) const {
  return shared_->ranks[rank].arrived.load(std::memory_order_acquire) >= step;
}

bool Team::all_arrived(std::uint64_t step) {
  if (seen_arrived_ >= step) return true;
  for (int r = 0; r < size_; ++r)
    if (!arrived(r, step)) return false;
  seen_arrived_ = step;
  return true;
}

bool Team::all_finished(std::uint64_t step) {
  if (seen_finished_ >= step) return true;
  for (int r = 0; r < size_; ++r)
    if (shared_->ranks[r].finished.load(std::memory_order_acquire) < step) return false;
  seen_finished_ = step;
  return true;
}

std::byte* Team::slot(int rank, std::uint64_t step) const {
  return slots_ + (2 * static_cast<std::size_t>(rank) + (step & 1)) * slot_bytes_;
}

std::size_t Team::region_of(const void* data, std::size_t bytes) const noexcept {
  const auto* begin = static_cast<const std::byte*>(data);
  for (std::size_t i = 0; i < regions_.size(); ++i) {
    const auto* part = regions_[i].of(rank_);
    if (begin >= part && begin + bytes <= part + regions_[i].stride) return i;
  }
  return regions_.size();
}

void Team::offer(std::uint64_t step, const void* data, std::size_t bytes) {
  Shared::Offer mine;
  const auto i = region_of(data, bytes);
  if (i < regions_.size())
    mine = {i + 1, static_cast<std::uint64_t>(static_cast<const std::byte*>(data) - regions_[i].of(rank_))};
  shared_->ranks[rank_].offers[step & 1] = mine;
}

bool Team::accept_offers(std::uint64_t step, std::vector<std::byte*>& data) const {
  data.clear();
  for (int r = 0; r < size_; ++r) {
    const auto& offer = shared_->ranks[r].offers[step & 1];
    if (offer.region == 0) {
      data.clear();
      return false;
    }
    data.push_back(regions_[offer.region - 1].of(r) + offer.offset);
  }
  return true;
}

std::size_t Team::claim(std::uint64_t step, std::size_t parts) {
  const std::uint64_t name = step << 32;
  auto now = shared_->claimed.load(std::memory_order_relaxed);
  for (;;) {
    const auto next = (now & ~std::uint64_t{0xffffffff}) == name ? now & 0xffffffff : 0;
    if (next >= parts) return parts;
    if (shared_->claimed.compare_exchange_weak(now, name | (next + 1), std::memory_order_relaxed)) return next;
  }
}

}  // namespace muster::detail::node
