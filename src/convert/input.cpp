#include "base/text.hpp"
#include "convert/convert.hpp"
#include "convert/hdf5_rows.hpp"
#include "hdf5/types.hpp"

#include <sys/stat.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <utility>

namespace muster::detail::convert {
namespace {

constexpr std::size_t bytes_at_once = 8 << 20;  ///< bytes that are read between two calls of ConvertOptions::progress
constexpr std::uint64_t largest_column = std::numeric_limits<std::int64_t>::max();

/// Bytes of one sample, with every product checked.
std::size_t bytes_per_sample(const NumberType& type, const std::vector<std::uint64_t>& shape,
                             const std::string& shown) {
  const auto refuse = [&](const std::string& fact) {
    throw Error(ExitCode::data, "reading " + shown, fact, "Give an array whose first dimension counts the samples");
  };
  if (shape.empty()) refuse("it holds one number, not samples");
  if (shape.size() > H5S_MAX_RANK) refuse(str("it has ", shape.size(), " dimensions; the most are ", H5S_MAX_RANK));
  if (shape.front() == 0) refuse("it holds no sample");
  std::uint64_t all = type.size;
  for (const auto size : shape) {
    if (size == 0) refuse("its samples are empty: a dimension is 0");
    if (size > largest_column / all) refuse("its dimensions are absurdly large");
    all *= size;
  }
  return all / shape.front();
}

/// A file on the disk, gzipped or not.
class DiskFile final : public InputStream {
 public:
  /// `file`: for errors.
  DiskFile(const std::filesystem::path& path, const InputFile& file) : file_(nullptr, gzclose_r) {
    struct stat status {};
    if (::stat(path.c_str(), &status) != 0) file.reject(std::strerror(errno), "Check the path");
    if (S_ISDIR(status.st_mode)) file.reject("it is a folder", "Name a file");
    if (S_ISREG(status.st_mode)) size_ = static_cast<std::uint64_t>(status.st_size);
    file_.reset(gzopen(path.c_str(), "rb"));
    if (!file_) file.reject(std::strerror(errno), "Check the permissions");
    gzbuffer(file_.get(), 1 << 18);
  }

  std::size_t read_some(std::span<std::byte> into, const InputFile& file) override {
    std::size_t done = 0;
    while (done < into.size()) {
      const auto want = static_cast<unsigned>(std::min<std::size_t>(into.size() - done, 1U << 30));
      const int got = gzread(file_.get(), into.data() + done, want);
      int status = Z_OK;
      const char* message = gzerror(file_.get(), &status);
      if (got < 0 || status != Z_OK) {
        if (status == Z_ERRNO) file.reject(std::strerror(errno));
        if (status == Z_BUF_ERROR)
          file.reject("the file is truncated: its gzip stream has no end", "Download it again");
        file.reject(str("its gzip stream is damaged (", message, ")"), "Download it again");
      }
      if (got == 0) break;
      done += static_cast<std::size_t>(got);
    }
    return done;
  }

  void expect_remaining(std::uint64_t bytes, const InputFile& file) const override {
    if (!size_) return;
    if (gzdirect(file_.get()) == 0) {
      if (bytes / most_deflated > *size_)
        file.reject(str("it announces ", bytes, " bytes, more than can be packed in it"));
      return;
    }
    file.expect_exactly(bytes, *size_ - std::min(*size_, static_cast<std::uint64_t>(gztell(file_.get()))));
  }

 private:
  std::optional<std::uint64_t> size_;  ///< bytes on the disk; none if it is not a regular file
  std::unique_ptr<gzFile_s, int (*)(gzFile_s*)> file_;
};

}  // namespace

InputFile::InputFile(const std::filesystem::path& path, Progress progress)
    : shown_(path.string()), progress_(std::move(progress)), stream_(std::make_unique<DiskFile>(path, *this)) {}

InputFile::InputFile(std::string shown, std::unique_ptr<InputStream> stream, Progress progress)
    : shown_(std::move(shown)), progress_(std::move(progress)), stream_(std::move(stream)) {}

std::size_t InputFile::read_some(std::span<std::byte> into) {
  std::size_t done = 0;
  for (bool ends = false; done < into.size() && !ends;) {
    if (progress_) progress_(0, 0);
    const auto piece = into.subspan(done, std::min(into.size() - done, bytes_at_once));
    const auto got = stream_->read_some(piece, *this);
    ends = got < piece.size();
    done += got;
  }
  return done;
}

void InputFile::read(std::span<std::byte> into) {
  if (read_some(into) < into.size()) reject("the file is truncated", "Make or copy it again");
}

void InputFile::skip(std::uint64_t bytes) {
  std::vector<std::byte> discarded(std::min<std::uint64_t>(bytes, 1 << 20));
  for (; bytes > 0; bytes -= std::min<std::uint64_t>(bytes, discarded.size()))
    read(std::span(discarded).first(std::min<std::uint64_t>(bytes, discarded.size())));
}

void InputFile::expect_end() {
  std::byte next;
  if (read_some({&next, 1}) > 0) reject("bytes follow after the values that it announces", "Make or copy it again");
}

void InputFile::expect_remaining(std::uint64_t bytes) const { stream_->expect_remaining(bytes, *this); }

void InputFile::expect_exactly(std::uint64_t bytes, std::uint64_t left) const {
  if (bytes != left)
    reject(str("it announces ", bytes, " bytes of values, but ", left, " follow: it is ",
               left < bytes ? "truncated" : "longer than it should be"),
           "Make or copy it again");
}

hdf5::Handle NumberType::memory_type() const {
  const hdf5::Lock lock;
  if (kind == 'b') return hdf5::memory_type_of(at::kBool);
  if (kind == 'f') return hdf5::memory_type_of(size == 2 ? at::kHalf : size == 4 ? at::kFloat : at::kDouble);
  if (kind == 'c') return hdf5::memory_type_of(size == 8 ? at::kComplexFloat : at::kComplexDouble);
  auto type = hdf5::memory_type_of(size == 1 ? at::kChar : size == 2 ? at::kShort : size == 4 ? at::kInt : at::kLong);
  if (kind == 'u') hdf5::check(H5Tset_sign(type.get(), H5T_SGN_NONE), "making a type");
  return type;
}

hdf5::Handle NumberType::file_type() const {
  const hdf5::Lock lock;
  auto type = memory_type();
  if (kind != 'b' && size > 1)
    hdf5::check(H5Tset_order(type.get(), big_endian ? H5T_ORDER_BE : H5T_ORDER_LE), "making a type");
  return type;
}

InputColumn::InputColumn(const NumberType& type, const std::vector<std::uint64_t>& shape, InputFile file)
    : InputColumn(type, shape, file.shown(), {}) {
  file.expect_remaining(sample_bytes_ * shape.front());
  file_ = std::move(file);
}

InputColumn::InputColumn(const NumberType& type, const std::vector<std::uint64_t>& shape, std::string shown,
                         std::vector<std::byte> values)
    : file_type_(type.file_type()),
      memory_type_(type.memory_type()),
      holds_whole_numbers_(type.kind != 'f' && type.kind != 'c'),
      value_bytes_(type.size),
      shape_(shape.begin(), shape.end()),
      sample_bytes_(bytes_per_sample(type, shape, shown)),
      shown_(std::move(shown)),
      values_(std::move(values)) {}

InputColumn::InputColumn(std::unique_ptr<Hdf5Rows> rows)
    : file_type_(rows->stored_type()),
      memory_type_(rows->memory_type()),
      holds_whole_numbers_(rows->holds_whole_numbers()),
      value_bytes_(rows->value_bytes()),
      shape_(rows->shape()),
      sample_bytes_(rows->row_bytes()),
      shown_(rows->shown()),
      rows_(std::move(rows)) {}

InputColumn::InputColumn(InputColumn&&) noexcept = default;
InputColumn::~InputColumn() = default;

hid_t InputColumn::dataset() const noexcept { return rows_ ? rows_->dataset() : H5I_INVALID_HID; }

void InputColumn::load() {
  if (!values_.empty()) return;
  values_.resize(sample_bytes_ * static_cast<std::size_t>(samples()));
  if (rows_) return rows_->read(0, samples(), values_);
  file_->read(values_);
  next_ = samples();
  finish();
}

void InputColumn::take(std::span<const std::int64_t> samples, std::span<std::byte> into,
                       const std::function<void()>& between) {
  if (!values_.empty()) return take_from_memory(samples, into);
  if (rows_) return rows_->read(samples, into, between);
  for (std::size_t i = 0; i < samples.size();) {
    const auto run = consecutive(samples.subspan(i));
    file_->skip(static_cast<std::uint64_t>(samples[i] - next_) * sample_bytes_);
    file_->read(into.subspan(i * sample_bytes_, run * sample_bytes_));
    next_ = samples[i] + static_cast<std::int64_t>(run);
    i += run;
  }
}

void InputColumn::take_from_memory(std::span<const std::int64_t> samples, std::span<std::byte> into) const {
  for (std::size_t i = 0; i < samples.size();) {
    const auto run = consecutive(samples.subspan(i));
    std::memcpy(into.data() + i * sample_bytes_, values_.data() + static_cast<std::size_t>(samples[i]) * sample_bytes_,
                run * sample_bytes_);
    i += run;
  }
}

std::string InputColumn::sample(std::int64_t index) const {
  return {reinterpret_cast<const char*>(values_.data()) + static_cast<std::size_t>(index) * sample_bytes_,
          sample_bytes_};
}

void InputColumn::finish() {
  if (!file_) return;
  file_->skip(static_cast<std::uint64_t>(samples() - next_) * sample_bytes_);
  file_->expect_end();
  file_.reset();
}

}  // namespace muster::detail::convert
