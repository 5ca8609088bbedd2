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
#include <vector>

namespace muster::tool::report {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t most_names = 20, most_of_name = 5, most_picture_bytes = 16 << 20;  ///< of all pictures of a run
constexpr std::uint64_t longest_record = 64 << 20;

/// Where a picture is.
struct Place {
  fs::path file;
  std::streamoff at = 0;  ///< of its record
};
using Places = std::map<std::string, std::map<std::int64_t, Place>>;  ///< by name and step

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

void find_pictures(const fs::path& path, Places& places) {
  std::ifstream file(path, std::ios::binary);
  std::string message;
  for (auto at = file.tellg(); read_record(file, message); at = file.tellg()) {
    bool begins_anew = false;
    std::vector<std::string> names;
    const auto step =
        for_each_picture(message, begins_anew, [&](const auto& name, const auto&) { names.push_back(name); });
    if (begins_anew)  // this start has the steps from this one on again
      for (auto& [name, of_name] : places) of_name.erase(of_name.lower_bound(step), of_name.end());
    for (const auto& name : names)
      if (places.contains(name) || places.size() < most_names) places[name][step] = {path, at};
  }
}

std::string picture_at(const Place& place, const std::string& name) {
  std::ifstream file(place.file, std::ios::binary);
  std::string message, found;
  bool ignored = false;
  if (file.seekg(place.at) && read_record(file, message))
    for_each_picture(message, ignored, [&](const auto& other, const auto& png) {
      if (other == name) found = png;
    });
  return found;
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
  Places places;
  for (const auto& file : files) try {
      find_pictures(file, places);
    } catch (const protozero::exception&) {  // a damaged record; what comes after it is left out
    }
  Json pictures = Json::array();
  std::size_t bytes = 0;
  for (const auto& [name, of_name] : places) {
    const auto count = std::min(most_of_name, of_name.size());
    for (std::size_t i = 0; i < count; ++i) {
      const auto index = count < 2 ? 0 : i * (of_name.size() - 1) / (count - 1);
      const auto& [step, place] = *std::next(of_name.begin(), static_cast<std::ptrdiff_t>(index));
      const auto png = picture_at(place, name);
      bytes += png.size();
      if (png.empty() || bytes > most_picture_bytes) continue;
      pictures.push_back({{"name", name}, {"step", step}, {"png", in_base_64(png)}});
    }
  }
  return pictures;
}

}  // namespace muster::tool::report
