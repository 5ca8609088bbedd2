// How fast a shuffled pass reads files that are not in the page cache and larger than the memory of its control group,
// and how many bytes it reads from the disk. A gzipped file: relative to reading the chunks in the order of the file
// and decoding them, by as many threads. Contiguous values: relative to a loop of preadv that reads the same samples.
//   cold_data FOLDER GIGABYTES     the size of each file, which is made in FOLDER unless it is there
// tests/soak/cold-data runs it with a limit of memory. Ends with 1 if a ratio is beyond its bound.
#include "base/file.hpp"
#include "hdf5/chunk_index.hpp"
#include "hdf5/file.hpp"
#include "hdf5/filter_pipeline.hpp"
#include "hdf5/filters.hpp"
#include "muster/muster.hpp"
#include "soak/plain_reading.hpp"
#include "support/hdf5_fixture.hpp"

#include <fcntl.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <thread>

namespace muster {
namespace {

constexpr int rounds = 3;
constexpr hsize_t chunk_rows = 16, row_values = 16 << 10;  // chunks of 1 MiB, samples of 64 KiB
constexpr std::size_t different_chunks = 64;
constexpr std::int64_t cache_bytes = 256 << 20;
constexpr std::size_t batch_size = 64;

/// A chunk of smooth values with some noise, shuffled and compressed as HDF5's filters do, at level 1.
std::vector<Bytef> make_chunk(unsigned seed) {
  std::mt19937 random(seed);
  constexpr std::size_t count = chunk_rows * row_values;
  std::vector<Bytef> shuffled(count * sizeof(float));
  for (std::size_t i = 0; i < count; ++i) {
    const float value =
        std::round(1000 * (std::sin(static_cast<float>(i) / 300) + 1e-4F * static_cast<float>(random() % 100))) / 1000;
    const auto* const bytes = reinterpret_cast<const Bytef*>(&value);
    for (std::size_t byte = 0; byte < sizeof value; ++byte) shuffled[byte * count + i] = bytes[byte];
  }
  uLongf length = compressBound(shuffled.size());
  std::vector<Bytef> packed(length);
  if (compress2(packed.data(), &length, shuffled.data(), shuffled.size(), 1) != Z_OK) std::abort();
  packed.resize(length);
  return packed;
}

/// A file of about that many bytes. The same few chunks follow each other, since making them takes long.
void make_file(const std::string& path, double bytes) {
  std::vector<std::vector<Bytef>> packed;
  for (unsigned seed = 0; seed < different_chunks; ++seed) packed.push_back(make_chunk(seed));
  const auto chunks = static_cast<hsize_t>(bytes / static_cast<double>(packed.front().size()));
  const detail::hdf5::Lock lock;
  test::H5File file(path);
  const hsize_t shape[] = {chunks * chunk_rows, row_values}, chunk[] = {chunk_rows, row_values};
  const detail::hdf5::Handle space(H5Screate_simple(2, shape, nullptr), H5Sclose);
  const detail::hdf5::Handle creation(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
  H5Pset_chunk(creation.get(), 2, chunk);
  H5Pset_shuffle(creation.get());
  H5Pset_deflate(creation.get(), 1);
  file.create("x", H5T_NATIVE_FLOAT, H5T_NATIVE_FLOAT, space.get(), creation.get(), nullptr);
  const detail::hdf5::Handle dataset(H5Dopen2(file.id(), "x", H5P_DEFAULT), H5Dclose);
  for (hsize_t i = 0; i < chunks; ++i) {
    const hsize_t place[] = {i * chunk_rows, 0};
    const auto& bytes_of_chunk = packed[i % packed.size()];
    detail::hdf5::check(
        H5Dwrite_chunk(dataset.get(), H5P_DEFAULT, 0, place, bytes_of_chunk.size(), bytes_of_chunk.data()), "fixture");
  }
}

void make_contiguous_file(const std::string& path, std::size_t rows) {
  {
    const detail::hdf5::Lock lock;
    const hsize_t shape[] = {rows, row_values};
    const detail::hdf5::Handle space(H5Screate_simple(2, shape, nullptr), H5Sclose);
    const detail::hdf5::Handle creation(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
    H5Pset_alloc_time(creation.get(), H5D_ALLOC_TIME_EARLY);
    H5Pset_fill_time(creation.get(), H5D_FILL_TIME_NEVER);
    test::H5File(path).create("x", H5T_NATIVE_FLOAT, H5T_NATIVE_FLOAT, space.get(), creation.get(), nullptr);
  }
  const auto offset = soak::contiguous_offset(path);
  std::vector<float> row(row_values);
  detail::File file(path, detail::File::Mode::write);
  for (std::size_t i = 0; i < rows; ++i) {
    row.front() = static_cast<float>(i);
    file.write_at(std::as_bytes(std::span(row)), offset + i * row_values * sizeof(float));
  }
}

void drop_from_page_cache(const std::string& path) {
  const detail::File file(path, detail::File::Mode::read);
  if (::fdatasync(file.descriptor()) != 0 || ::posix_fadvise(file.descriptor(), 0, 0, POSIX_FADV_DONTNEED) != 0)
    std::abort();
}

/// Bytes that this process has had read from a disk.
double bytes_from_disk() {
  std::ifstream io("/proc/self/io");
  std::string name;
  for (double bytes = 0; io >> name >> bytes;)
    if (name == "read_bytes:") return bytes;
  std::abort();
}

/// CPU time of this process, in seconds.
double cpu_seconds() {
  timespec time{};
  if (::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time) != 0) std::abort();
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

struct Figures {
  double seconds, bytes, cpu;
};
Figures measure(const std::string& path, const std::function<void()>& action) {
  drop_from_page_cache(path);
  const auto bytes = bytes_from_disk();
  const auto cpu = cpu_seconds();
  const auto begin = std::chrono::steady_clock::now();
  action();
  return {std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(), bytes_from_disk() - bytes,
          cpu_seconds() - cpu};
}

/// Reads and decodes the chunks in the order of the file, on as many threads as a pass decodes with, into the memory of
/// a few batches.
void read_in_sequence(const std::string& path) {
  const auto file = detail::hdf5::open_file(path);
  const auto dataset = detail::hdf5::open_dataset(file.get(), "x", path);
  const detail::hdf5::ChunkIndex index(dataset.get(), path);
  std::vector<std::int64_t> numbers(static_cast<std::size_t>(index.grid().front()));
  std::iota(numbers.begin(), numbers.end(), 0);
  const auto chunks = index.locate(numbers);
  const auto creation = detail::hdf5::dataset_property(dataset.get(), H5Dget_create_plist, "reading");
  const detail::hdf5::FilterPipeline pipeline(detail::hdf5::filters(creation.get(), "reading"));
  const detail::File bytes(path, detail::File::Mode::read);
  constexpr std::size_t chunk_bytes = chunk_rows * row_values * sizeof(float),
                        chunks_of_batches = 4 * batch_size / chunk_rows;
  detail::hdf5::Buffer batches;
  const auto memory = batches.take(chunks_of_batches * chunk_bytes);
  std::atomic<std::size_t> next = 0;
  const auto work = [&] {
    detail::hdf5::Buffer stored;
    detail::hdf5::FilterPipeline::Workspace workspace;
    for (std::size_t i = next++; i < chunks.size(); i = next++) {
      const auto encoded = stored.take(chunks[i].bytes);
      bytes.read_at(encoded, chunks[i].offset);
      pipeline.decode(encoded, chunks[i].filter_mask, memory.subspan(i % chunks_of_batches * chunk_bytes, chunk_bytes),
                      workspace, "reading");
    }
  };
  std::vector<std::jthread> threads;
  for (unsigned i = 1; i < std::min(5U, std::thread::hardware_concurrency()); ++i) threads.emplace_back(work);
  work();
}

void read_shuffled(Launch& launch, const std::string& path) {
  std::int64_t samples = 0;
  TorchTrainer trainer(launch,
                       [&](Session& session, const Config&) {
                         for (const auto& batch : session.get_dataset_shard().iter_torch_batches(
                                  {.batch_size = batch_size, .training = false, .shuffle = true}))
                           samples += batch.size();
                       },
                       {.datasets = {{"train", Dataset::from_hdf5({path}, {.cache_bytes = cache_bytes})}}});
  if (trainer.fit().error || samples == 0) std::abort();
}

bool print(const std::string& what, double value, double bound, bool is_within) {
  std::printf("%-52s %5.2f  (bound %.2f)%s\n", what.c_str(), value, bound, is_within ? "" : "  BEYOND");
  return is_within;
}

/// `other`: what the shuffled pass is compared with, and its name.
bool compare(Launch& launch, const std::string& path, const std::string& name, const std::function<void()>& other,
             double least) {
  const auto size = static_cast<double>(std::filesystem::file_size(path));
  std::vector<double> ratios;
  double most_bytes = 0;
  for (int round = 0; round < rounds; ++round) {
    const auto plain = measure(path, other);
    const auto shuffled = measure(path, [&] { read_shuffled(launch, path); });
    std::printf("round %d", round + 1);
    for (const auto& [side, figures] : {std::pair(name.c_str(), plain), std::pair("shuffled pass", shuffled)})
      std::printf("  %s %.1f s (CPU %.1f s, %.0f MB/s, %.2f of the file)", side, figures.seconds, figures.cpu,
                  size / 1e6 / figures.seconds, figures.bytes / size);
    std::printf("\n");
    std::fflush(stdout);
    ratios.push_back(plain.seconds / shuffled.seconds);
    most_bytes = std::max(most_bytes, shuffled.bytes / size);
  }
  std::ranges::sort(ratios);
  const bool quick =
      print("speed of a shuffled pass to " + name, ratios[rounds / 2], least, ratios[rounds / 2] >= least);
  const bool sparing = most_bytes <= 1.1;
  return print("bytes read by it to those of the file", most_bytes, 1.1, sparing) && quick;
}

bool compare_gzip(Launch& launch, const std::string& folder, double gigabytes) {
  const auto path = folder + "/gzip.h5";
  if (!std::filesystem::exists(path)) make_file(path, 1e9 * gigabytes);
  return compare(
      launch, path, "reading in sequence", [&] { read_in_sequence(path); }, 0.9);
}

bool compare_contiguous(Launch& launch, const std::string& folder, double gigabytes) {
  const auto path = folder + "/contiguous.h5";
  constexpr std::size_t sample_bytes = row_values * sizeof(float);
  const auto rows = static_cast<std::size_t>(1e9 * gigabytes / sample_bytes);
  if (!std::filesystem::exists(path)) make_contiguous_file(path, rows);
  soak::Order order(rows);
  std::iota(order.begin(), order.end(), 0);
  std::ranges::shuffle(order, std::mt19937(1));
  const auto offset = soak::contiguous_offset(path);
  return compare(
      launch, path, "a loop of preadv", [&] { soak::read_plainly(path, offset, order, batch_size, sample_bytes); },
      0.95);
}

}  // namespace
}  // namespace muster

int main(int count, char** arguments) {
  if (count != 3) {
    std::fprintf(stderr, "cold_data FOLDER GIGABYTES\n");
    return 64;
  }
  const auto gigabytes = std::strtod(arguments[2], nullptr);
  const muster::test::Folder folder;
  std::vector<std::string> words{"cold_data",   "--storage", folder.file("runs"), "--progress", "none",
                                 "--log-level", "error"};
  std::vector<char*> flags;
  for (auto& word : words) flags.push_back(word.data());
  muster::Launch launch(static_cast<int>(flags.size()), flags.data());
  return launch.run([&] {
    const bool gzip_is_quick = muster::compare_gzip(launch, arguments[1], gigabytes);
    return muster::compare_contiguous(launch, arguments[1], gigabytes) && gzip_is_quick ? 0 : 1;
  });
}
