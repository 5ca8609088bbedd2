// Reads NumPy's .npz files: zip archives of .npy files, stored or deflated.
#include "base/file.hpp"
#include "base/text.hpp"
#include "convert/npy.hpp"
#include "muster/convert.hpp"

#ifdef MUSTER_HAS_LIBZIP
#include <zip.h>
#endif

#include <algorithm>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

namespace muster {

#ifdef MUSTER_HAS_LIBZIP
namespace {

using detail::convert::InputColumn, detail::convert::InputFile, detail::convert::InputStream,
    detail::convert::NpyHeader;

constexpr std::string_view array_suffix = ".npy";

/// The text of an error of libzip.
std::string zip_text(int code) {
  zip_error_t error;
  zip_error_init_with_code(&error, code);
  std::string text = zip_error_strerror(&error);
  zip_error_fini(&error);
  return text;
}

/// An array of an archive: an entry whose name ends with .npy.
struct ArrayEntry {
  std::string name;  ///< without .npy
  zip_uint64_t index = 0;
};

/// The bytes of one entry. libzip verifies its size and its checksum when its end is read.
class EntryStream final : public InputStream {
 public:
  EntryStream(std::shared_ptr<zip_t> archive, zip_file_t* entry, std::uint64_t bytes)
      : archive_(std::move(archive)), entry_(entry, zip_fclose), left_(bytes) {}

  std::size_t read_some(std::span<std::byte> into, const InputFile& file) override {
    std::size_t done = 0;
    while (done < into.size()) {
      const auto got = zip_fread(entry_.get(), into.data() + done, into.size() - done);
      if (got < 0)
        file.reject(
            detail::str("it is damaged or truncated (", zip_error_strerror(zip_file_get_error(entry_.get())), ")"),
            "Make or copy the archive again");
      if (got == 0) break;
      done += static_cast<std::size_t>(got);
    }
    left_ -= std::min<std::uint64_t>(left_, done);
    return done;
  }
  void expect_remaining(std::uint64_t bytes, const InputFile& file) const override {
    file.expect_exactly(bytes, left_);
  }

 private:
  std::shared_ptr<zip_t> archive_;  // outlives the entry
  std::unique_ptr<zip_file_t, int (*)(zip_file_t*)> entry_;
  std::uint64_t left_;  ///< bytes that are left to read
};

/// An opened archive.
class Archive {
 public:
  explicit Archive(const std::filesystem::path& path)
      : path_(path), file_(path.string(), nullptr), bytes_(detail::File(path, detail::File::Mode::read).size()) {
    int code = 0;
    archive_.reset(zip_open(path.c_str(), ZIP_RDONLY, &code), zip_discard);
    if (!archive_)
      file_.reject("it is not a whole .npz archive (" + zip_text(code) + ")",
                   "Make or copy it again; numpy.savez makes one");
    for (zip_int64_t i = 0; i < zip_get_num_entries(archive_.get(), 0); ++i) {
      const auto index = static_cast<zip_uint64_t>(i);
      const std::string_view name = stat(index, file_).name;
      if (!name.ends_with(array_suffix)) continue;
      arrays_.push_back({std::string(name.substr(0, name.size() - array_suffix.size())), index});
    }
    if (arrays_.empty()) file_.reject("there is no array in it", "numpy.savez makes archives of arrays");
  }

  const std::vector<ArrayEntry>& arrays() const noexcept { return arrays_; }

  /// The array of that name. Throws an Error if there is none, or if there are several.
  const ArrayEntry& find(const std::string& name) const {
    const auto found = std::ranges::find(arrays_, name, &ArrayEntry::name);
    if (found == arrays_.end()) file_.reject("there is no array \"" + name + "\" in it", "Its arrays are " + listed());
    if (std::ranges::count(arrays_, name, &ArrayEntry::name) > 1)
      file_.reject("there are several arrays \"" + name + "\" in it", "Save it again, each array under its own name");
    return *found;
  }

  /// The array's .npy file.
  InputFile open(const ArrayEntry& array, const detail::convert::Progress& progress) const {
    const auto shown = path_.string() + ":" + array.name;
    const InputFile unread(shown, nullptr);
    const auto status = stat(array.index, unread);
    if (status.encryption_method != ZIP_EM_NONE)
      unread.reject("it is encrypted", "Make the archive again without a password");
    if (status.comp_method != ZIP_CM_STORE && status.comp_method != ZIP_CM_DEFLATE)
      unread.reject(detail::str("it is compressed by method ", status.comp_method, " of zip, not by deflate"),
                    "Save it again with numpy.savez_compressed");
    const auto most = status.comp_method == ZIP_CM_STORE ? 1 : detail::convert::most_deflated;
    if (status.comp_size > bytes_ || status.size / most > status.comp_size)
      unread.reject(detail::str("it announces ", status.size, " bytes, more than can be packed in it"),
                    "Make or copy the archive again");
    auto* const entry = zip_fopen_index(archive_.get(), array.index, 0);
    if (entry == nullptr)
      unread.reject(detail::str("it is damaged or truncated (", zip_strerror(archive_.get()), ")"),
                    "Make or copy the archive again");
    return {shown, std::make_unique<EntryStream>(archive_, entry, status.size), progress};
  }

  [[noreturn]] void reject_all(const std::string& fact, const std::string& remedy) const { file_.reject(fact, remedy); }

 private:
  zip_stat_t stat(zip_uint64_t index, const InputFile& file) const {
    constexpr zip_uint64_t wanted = ZIP_STAT_NAME | ZIP_STAT_SIZE | ZIP_STAT_COMP_SIZE | ZIP_STAT_COMP_METHOD;
    zip_stat_t status;
    zip_stat_init(&status);
    if (zip_stat_index(archive_.get(), index, 0, &status) != 0 || (status.valid & wanted) != wanted)
      file.reject("its list of entries is damaged", "Make or copy it again");
    return status;
  }
  std::string listed() const {
    std::string text;
    for (const auto& array : arrays_) text += (text.empty() ? "" : ", ") + array.name;
    return text;
  }

  std::filesystem::path path_;
  InputFile file_;  ///< only for errors
  std::uint64_t bytes_;
  std::shared_ptr<zip_t> archive_;
  std::vector<ArrayEntry> arrays_;
};

/// An array with its header read, under the name of its column.
struct OpenedArray {
  std::string name;
  NpyHeader header;
  InputFile file;
};

/// Opens the arrays that the options name as columns; if they name none, all that are not single values.
std::vector<OpenedArray> open_arrays(const Archive& archive, const ConvertOptions& options) {
  auto names = options.columns;
  const bool all = names.empty();
  if (all)
    for (const auto& array : archive.arrays()) names.push_back(array.name);
  std::vector<OpenedArray> opened;
  for (const auto& name : names) {
    auto file = archive.open(archive.find(name), options.progress);
    auto header = detail::convert::read_npy_header(file);
    if (all && header.shape.empty()) continue;
    if (name.find('/') != std::string::npos)
      file.reject("its name has a slash, which columns cannot have",
                  "Choose other arrays with --columns, or save it under another name");
    opened.push_back({name, std::move(header), std::move(file)});
  }
  if (opened.empty())
    archive.reject_all("it holds single values only", "Give arrays whose first dimension counts the samples");
  return opened;
}

}  // namespace

std::vector<std::filesystem::path> convert_npz(const std::vector<std::filesystem::path>& inputs,
                                               const std::filesystem::path& output, const ConvertOptions& options) {
  if (inputs.size() != 1)
    throw Error(ExitCode::usage, "converting to " + output.string(),
                detail::str(inputs.size(), " inputs are given, and one .npz archive is read"), "Name one");
  auto arrays = open_arrays(Archive(inputs.front()), options);
  std::vector<std::string> names;
  for (const auto& array : arrays) names.push_back(array.name);
  detail::convert::check_conversion(inputs, names.size(), names, output, options);
  std::vector<InputColumn> columns;
  for (auto& array : arrays) columns.push_back(detail::convert::npy_column(array.header, std::move(array.file)));
  return detail::convert::convert_columns(std::move(columns), names, output, options);
}

#else

std::vector<std::filesystem::path> convert_npz(const std::vector<std::filesystem::path>& /*inputs*/,
                                               const std::filesystem::path& output, const ConvertOptions& /*options*/) {
  throw Error(ExitCode::missing_package, "converting to " + output.string(), "muster was built without libzip",
              "Install it (libzip-dev on Debian) and build muster again");
}

#endif

}  // namespace muster
