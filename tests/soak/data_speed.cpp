// How fast datasets are read on one core, as ratios of the best times within one run: contiguous columns to a plain
// loop of preadv into the same tensors, chunked columns to contiguous ones, and gzip to zlib: the inflate alone, and a
// loop that reads, inflates and unshuffles each chunk into the same tensors. Before that, in absolute times: how soon a
// pass over a large dataset begins, what planning its samples costs, and how long a step waits for data.
//   data_speed [MEGABYTES]     of each file; 256 unless given. Files are warm: they were written just before.
//   data_speed passes          only what is measured in absolute times
// Ends with 1 if a figure misses its bound.
#include "base/file.hpp"
#include "hdf5/chunk_index.hpp"
#include "hdf5/codecs.hpp"
#include "hdf5/file.hpp"
#include "muster/dataset.hpp"
#include "soak/pass_speed.hpp"
#include "soak/plain_reading.hpp"
#include "support/hdf5_fixture.hpp"

#include <ATen/ops/empty.h>
#include <sched.h>
#include <time.h>
#include <zlib.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace muster {
namespace {

using soak::Order;
using soak::read_plainly;

constexpr std::size_t batch_bytes = 12 << 20;
constexpr int rounds = 7;
bool too_slow = false;

/// Of this process on its core; unlike time on the clock, it does not count what other processes take.
double now() {
  timespec time{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}
double seconds(const std::function<void()>& action) {
  const auto begin = now();
  action();
  return now() - begin;
}

double best(const std::vector<double>& times) { return *std::ranges::min_element(times); }

void print(const std::string& what, double ratio, double bound, double megabytes_per_second) {
  const bool slow = ratio < bound;
  too_slow = too_slow || slow;
  std::printf("%-56s %5.2f  (at least %.2f)%s  %6.0f MB/s\n", what.c_str(), ratio, bound, slow ? " TOO SLOW" : "",
              megabytes_per_second);
  std::fflush(stdout);
}

/// Samples of smooth floats with some noise, which compress about as measurements do.
std::vector<float> make_values(std::size_t count) {
  std::vector<float> values(count);
  std::mt19937 random(1);
  for (std::size_t i = 0; i < count; ++i)
    values[i] =
        std::round(1000 * (std::sin(static_cast<float>(i) / 300) + 1e-4F * static_cast<float>(random() % 100))) / 1000;
  return values;
}

/// Writes the file again in large pieces. The kernel keeps it in pages as large as the pieces that were written, and
/// HDF5 writes chunk by chunk.
void write_again(const std::string& path) {
  const auto content = detail::read_file(path);
  std::filesystem::remove(path);
  detail::File(path, detail::File::Mode::create).write_at(std::as_bytes(std::span(content)), 0);
}

/// `chunk_rows`: 0 for contiguous values.
void write(const std::string& path, const std::vector<float>& values, std::size_t rows, hsize_t chunk_rows, bool gzip) {
  {
    const detail::hdf5::Lock lock;
    test::H5File file(path);
    const hsize_t shape[] = {rows, values.size() / rows}, chunk[] = {chunk_rows, shape[1]};
    const detail::hdf5::Handle space(H5Screate_simple(2, shape, nullptr), H5Sclose);
    const detail::hdf5::Handle creation(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
    if (chunk_rows > 0) H5Pset_chunk(creation.get(), 2, chunk);
    if (gzip) H5Pset_shuffle(creation.get()), H5Pset_deflate(creation.get(), 6);
    file.create("x", H5T_NATIVE_FLOAT, H5T_NATIVE_FLOAT, space.get(), creation.get(), values.data());
  }
  write_again(path);
}

/// Reads all samples in batches.
void read_all(const Dataset& dataset, const Order& order, std::size_t batch) {
  for (std::size_t begin = 0; begin < order.size(); begin += batch)
    dataset.read(std::span(order).subspan(begin, std::min(batch, order.size() - begin)));
}

struct StoredChunk {
  std::uint64_t offset;
  std::string bytes;
};

/// The stored chunks of a dataset, in the order of its rows.
std::vector<StoredChunk> stored_chunks(const std::string& path) {
  const auto file = detail::hdf5::open_file(path);
  const auto dataset = detail::hdf5::open_dataset(file.get(), "x", path);
  const detail::hdf5::ChunkIndex index(dataset.get(), path);
  std::vector<std::int64_t> numbers(static_cast<std::size_t>(index.grid().front()));
  std::iota(numbers.begin(), numbers.end(), 0);
  const detail::File bytes(path, detail::File::Mode::read);
  std::vector<StoredChunk> all;
  for (const auto& chunk : index.locate(numbers)) {
    all.push_back({chunk.offset, std::string(chunk.bytes, '\0')});
    bytes.read_at(std::as_writable_bytes(std::span(all.back().bytes)), chunk.offset);
  }
  return all;
}

void inflate_with_zlib(std::span<const char> stored, std::span<std::byte> into) {
  uLongf length = into.size();
  if (uncompress(reinterpret_cast<Bytef*>(into.data()), &length, reinterpret_cast<const Bytef*>(stored.data()),
                 stored.size()) != Z_OK)
    std::abort();
}

/// Reads all chunks, inflates and unshuffles them with plain loops, and fills tensors of a batch's size.
void read_with_zlib(const std::string& path, const std::vector<StoredChunk>& chunks, std::size_t chunk_bytes,
                    std::size_t batch_bytes) {
  const detail::File file(path, detail::File::Mode::read);
  std::vector<char> stored;
  std::vector<std::byte> inflated(chunk_bytes);
  at::Tensor batch;
  for (std::size_t i = 0, filled = batch_bytes; i < chunks.size(); ++i, filled += chunk_bytes) {
    stored.resize(chunks[i].bytes.size());
    file.read_at(std::as_writable_bytes(std::span(stored)), chunks[i].offset);
    inflate_with_zlib(stored, inflated);
    if (filled + chunk_bytes > batch_bytes) {
      batch = at::empty({static_cast<std::int64_t>(std::max(batch_bytes, chunk_bytes) / sizeof(float))}, at::kFloat);
      filled = 0;
    }
    auto* const values = static_cast<std::byte*>(batch.mutable_data_ptr()) + filled;
    for (std::size_t byte = 0; byte < sizeof(float); ++byte)
      for (std::size_t value = 0; value < chunk_bytes / sizeof(float); ++value)
        values[value * sizeof(float) + byte] = inflated[byte * (chunk_bytes / sizeof(float)) + value];
  }
}

void measure(std::size_t sample_kb, std::size_t megabytes) {
  const test::Folder folder;
  const auto sample_bytes = sample_kb << 10, rows = (megabytes << 20) / sample_bytes,
             batch = batch_bytes / sample_bytes;
  const auto total = static_cast<double>(rows * sample_bytes);
  const auto chunk_rows = std::max<std::size_t>(1, (1 << 20) / sample_bytes);
  const auto values = make_values(rows * sample_bytes / sizeof(float));
  const auto path = [&](const char* name) { return folder.file(name); };
  write(path("contiguous"), values, rows, 0, false);
  write(path("row chunks"), values, rows, 1, false);
  write(path("chunks"), values, rows, chunk_rows, false);
  write(path("gzip"), values, rows, chunk_rows, true);
  const auto offset = soak::contiguous_offset(path("contiguous"));
  Order shuffled(rows), ascending(rows);
  std::iota(ascending.begin(), ascending.end(), 0);
  shuffled = ascending;
  std::ranges::shuffle(shuffled, std::mt19937(2));
  const auto open = [&](const char* name, std::int64_t cache_bytes = std::int64_t{4} << 30) {
    return Dataset::from_hdf5({path(name)}, {.cache_bytes = cache_bytes});
  };

  const auto whole = open("contiguous"), of_rows = open("row chunks"), of_chunks = open("chunks");
  std::vector<double> plain, contiguous, first_rows, later_rows, first_chunks, later_chunks;
  for (int round = 0; round < rounds; ++round) {
    plain.push_back(seconds([&] { read_plainly(path("contiguous"), offset, shuffled, batch, sample_bytes); }));
    contiguous.push_back(seconds([&] { read_all(whole, shuffled, batch); }));
    first_rows.push_back(seconds([&] { read_all(open("row chunks"), shuffled, batch); }));
    later_rows.push_back(seconds([&] { read_all(of_rows, shuffled, batch); }));
    first_chunks.push_back(seconds([&] { read_all(open("chunks"), shuffled, batch); }));
    later_chunks.push_back(seconds([&] { read_all(of_chunks, shuffled, batch); }));
  }
  const auto ratio = [&](const std::string& what, const std::vector<double>& ours, const std::vector<double>& other,
                         double bound) {
    print(std::to_string(sample_kb) + " KB, " + what, best(other) / best(ours), bound, total / 1e6 / best(ours));
  };
  ratio("contiguous to a loop of preadv", contiguous, plain, 0.95);
  ratio("a chunk for each sample to contiguous, first pass", first_rows, contiguous, 0.6);
  ratio("a chunk for each sample to contiguous, later", later_rows, contiguous, 0.9);
  ratio("chunks of 1 MB to contiguous, first pass", first_chunks, contiguous, 0.6);
  ratio("chunks of 1 MB to contiguous, later", later_chunks, contiguous, 0.9);

  const auto chunks = stored_chunks(path("gzip"));
  const detail::hdf5::Filter deflate{.id = H5Z_FILTER_DEFLATE};
  const auto inflate = detail::hdf5::decoder_of(deflate);
  std::vector<std::byte> inflated(chunk_rows * sample_bytes);
  const auto packed = open("gzip"), beyond_cache = open("gzip", 4 << 20);
  read_all(packed, ascending, batch);
  std::vector<double> zlib, ours, zlib_loop, gzip, cached;
  for (int round = 0; round < rounds; ++round) {
    zlib.push_back(seconds([&] {
      for (const auto& chunk : chunks) inflate_with_zlib(chunk.bytes, inflated);
    }));
    ours.push_back(seconds([&] {
      for (const auto& chunk : chunks)
        if (!inflate(deflate, std::as_bytes(std::span(chunk.bytes)), inflated)) std::abort();
    }));
    zlib_loop.push_back(
        seconds([&] { read_with_zlib(path("gzip"), chunks, chunk_rows * sample_bytes, batch * sample_bytes); }));
    gzip.push_back(seconds([&] { read_all(beyond_cache, ascending, batch); }));
    cached.push_back(seconds([&] { read_all(packed, shuffled, batch); }));
  }
  ratio("gzip inflated, to zlib's inflate", ours, zlib, 1.8);
  ratio("gzip beyond the cache, to a loop with zlib", gzip, zlib_loop, 1.8);
  ratio("gzip in the cache to contiguous", cached, contiguous, 0.9);
}

}  // namespace
}  // namespace muster

int main(int count, char** arguments) {
  const bool passes_are_fast = muster::soak::measure_passes();  // with a core for the thread that reads ahead
  if (count > 1 && arguments[1] == std::string_view("passes")) return passes_are_fast ? 0 : 1;
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(static_cast<std::size_t>(::sched_getcpu()), &one);
  ::sched_setaffinity(0, sizeof one, &one);
  for (const std::size_t sample_kb : {3, 48, 192})
    muster::measure(sample_kb, count > 1 ? std::strtoul(arguments[1], nullptr, 10) : 256);
  return muster::too_slow || !passes_are_fast ? 1 : 0;
}
