#include "pictures.hpp"

#include <protozero/pbf_reader.hpp>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <map>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

namespace muster::tool::report {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t most_names = 20, most_of_name = 5, most_picture_bytes = 1 << 20;
constexpr std::uint64_t longest_record = 64 << 20;

using Pictures = std::map<std::string, std::map<std::int64_t, std::string>>;  ///< PNG by name and step

/// Reads the message of the record that begins here; none at the end of the file.
bool read_record(std::ifstream& file, std::string& message) {
  std::array<char, 12> head{};
  std::uint64_t length = 0;
  if (!file.read(head.data(), head.size())) return false;
  std::memcpy(&length, head.data(), sizeof length);
  if (length > longest_record) return false;
  message.resize(length);
  return static_cast<bool>(file.read(message.data(), static_cast<std::streamsize>(length)).ignore(4));
}

/// Calls use(name, PNG) for each picture of an event. Fields of tensorflow.Event: 2 step, 5 summary, 7 session log.
/// Returns the step.
template <class Use>
std::int64_t for_each_picture(const std::string& message, bool& begins_anew, const Use& use) {
  std::int64_t step = 0;
  for (protozero::pbf_reader event(message); event.next();) {
    if (event.tag() == 2) {
      step = event.get_int64();
    } else if (event.tag() == 7) {
      event.skip();
      begins_anew = true;
    } else if (event.tag() == 5) {
      for (auto summary = event.get_message(); summary.next(1);) {
        std::string name;
        for (auto value = summary.get_message(); value.next();) {
          if (value.tag() == 1) {
            name = value.get_string();
          } else if (value.tag() == 4) {
            auto image = value.get_message();
            if (image.next(4)) use(name, image.get_string());
          } else {
            value.skip();
          }
        }
      }
    } else {
      event.skip();
    }
  }
  return step;
}

/// Adds the pictures of a file. Of many with a name the first stays, and the newest.
void add_pictures(const fs::path& path, Pictures& pictures) {
  std::ifstream file(path, std::ios::binary);
  std::string message;
  while (read_record(file, message)) {
    bool begins_anew = false;
    std::vector<std::pair<std::string, std::string>> found;
    const auto step = for_each_picture(message, begins_anew,
                                       [&](const auto& name, const auto& png) { found.emplace_back(name, png); });
    if (begins_anew)  // this start has the steps from this one on again
      for (auto& [name, of_name] : pictures) of_name.erase(of_name.lower_bound(step), of_name.end());
    for (auto& [name, png] : found) {
      if (png.size() > most_picture_bytes || (!pictures.contains(name) && pictures.size() == most_names)) continue;
      auto& of_name = pictures[name];
      of_name[step] = std::move(png);
      if (of_name.size() > most_of_name) of_name.erase(std::next(of_name.begin()));
    }
  }
}

std::string in_base_64(const std::string& bytes) {
  constexpr std::string_view digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string text;
  for (std::size_t i = 0; i < bytes.size(); i += 3) {
    std::uint32_t three = 0;
    const auto count = std::min<std::size_t>(3, bytes.size() - i);
    for (std::size_t j = 0; j < 3; ++j)
      three = three << 8 | (j < count ? static_cast<unsigned char>(bytes[i + j]) : 0u);
    for (std::size_t j = 0; j < 4; ++j) text += j <= count ? digits[three >> (18 - 6 * j) & 63] : '=';
  }
  return text;
}

}  // namespace

Json pictures_of(const fs::path& run) {
  std::vector<fs::path> files;
  std::error_code error;
  for (fs::directory_iterator at(run, error), end; !error && at != end; at.increment(error))
    if (at->path().filename().string().starts_with("events.out.tfevents.")) files.push_back(at->path());
  std::ranges::sort(files);
  Pictures all;
  for (const auto& file : files) try {
      add_pictures(file, all);
    } catch (const protozero::exception&) {  // a damaged record; what comes after it is left out
    }
  Json pictures = Json::array();
  for (const auto& [name, of_name] : all)
    for (const auto& [step, png] : of_name)
      pictures.push_back({{"name", name}, {"step", step}, {"png", in_base_64(png)}});
  return pictures;
}

}  // namespace muster::tool::report
