// muster convert: makes datasets from downloaded files, or from datasets with another layout.
#include "base/text.hpp"
#include "checkpoint_text.hpp"
#include "commands.hpp"
#include "dataset_text.hpp"
#include "interrupt.hpp"
#include "progress_line.hpp"
#include "text.hpp"

#include <muster/convert.hpp>
#include <muster/error.hpp>

#include <charconv>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace muster::tool {
namespace {

using Converter = std::vector<std::filesystem::path> (*)(const std::vector<std::filesystem::path>&,
                                                         const std::filesystem::path&, const ConvertOptions&);

/// The arguments of one conversion.
struct ConvertArguments {
  std::vector<std::filesystem::path> files;  ///< the input files, and at the end the output file
  std::optional<std::string> columns;
  std::vector<std::string> split, types;
  std::string header;
  ConvertOptions options;
  bool json = false;
};

/// Splits text at commas: "a,b," gives a, b and an empty name, which the conversion refuses.
std::vector<std::string> separated(const std::string& text) {
  std::vector<std::string> names;
  for (std::size_t begin = 0, end = 0; end != text.npos; begin = end + 1) {
    end = text.find(',', begin);
    names.push_back(text.substr(begin, end == text.npos ? end : end - begin));
  }
  return names;
}

std::pair<std::string, double> parse_split(const std::string& text) {
  const auto equals = text.find('=');
  double share = 0;
  if (equals != std::string::npos) {
    const auto [end, error] = std::from_chars(text.data() + equals + 1, text.data() + text.size(), share);
    if (error == std::errc{} && end == text.data() + text.size()) return {text.substr(0, equals), share};
  }
  throw Error(ExitCode::usage, "reading --split", "\"" + text + "\" is not NAME=SHARE, as in train=0.9",
              "Name the files first and --split after them");
}

std::pair<std::string, std::string> parse_type(const std::string& text) {
  const auto equals = text.find('=');
  if (equals == std::string::npos)
    throw Error(ExitCode::usage, "reading --type", "\"" + text + "\" is not COLUMN=TYPE, as in y=float64",
                "Name the files first and --type after them");
  return {text.substr(0, equals), text.substr(equals + 1)};
}

void convert(Converter converter, ConvertArguments& arguments) {
  auto& options = arguments.options;
  if (arguments.columns) options.columns = separated(*arguments.columns);
  for (const auto& text : arguments.split) options.split.push_back(parse_split(text));
  for (const auto& text : arguments.types)
    if (const auto [column, type] = parse_type(text); !options.types.emplace(column, type).second)
      throw Error(ExitCode::usage, "reading --type", "the column " + column + " is given twice",
                  "Give each column once");
  if (!arguments.header.empty()) options.header = arguments.header == "yes";
  if (arguments.files.size() < 2)
    throw Error(ExitCode::usage, "converting", "inputs and an output are wanted", "Name the output last, as OUT.h5");
  const auto output = arguments.files.back();
  const std::vector<std::filesystem::path> inputs(arguments.files.begin(), arguments.files.end() - 1);
  require_outside_records(output);

  const InterruptGuard interrupt(/*restarts_calls=*/false);  // a signal must end a read that waits for a pipe
  std::vector<std::filesystem::path> written;
  {
    ProgressLine line;
    options.progress = [&](std::uint64_t done, std::uint64_t total) {
      interrupt.check();
      if (total == 0) return;  // the inputs are still being read
      line.show(detail::str("writing ", bytes_text(done), " of ", bytes_text(total), " (", 100 * done / total, "%)"));
    };
    try {
      written = converter(inputs, output, options);
    } catch (const Error&) {
      interrupt.check();  // a signal may have ended a read
      throw;
    }
  }
  Json files = Json::array();
  for (const auto& path : written) files.push_back(describe_dataset(path.string()));
  if (arguments.json) {
    print_json({{"files", files}});
    return;
  }
  for (const auto& file : files) std::cout << (&file == &files.front() ? "" : "\n") << "wrote " << dataset_text(file);
}

void add_format(CLI::App& parent, const std::string& name, const std::string& description, const std::string& example,
                Converter converter) {
  const bool copies = converter == convert_h5 || converter == convert_npz || converter == convert_zarr;
  const std::string input = converter == convert_npz    ? "IN.npz"
                            : converter == convert_zarr ? "IN.zarr[:/group]"
                            : copies                    ? "IN.h5[:/group]"
                                                        : "IN...";
  auto* command = parent.add_subcommand(name, description);
  auto arguments = std::make_shared<ConvertArguments>();
  auto& options = arguments->options;
  command
      ->add_option("files", arguments->files,
                   detail::str(copies ? "The input" : "Inputs", ", and last the file to make (replaced if it exists)"))
      ->option_text(input + " OUT.h5");
  command
      ->add_option("--columns", arguments->columns,
                   copies ? "The columns to copy, in this order; all unless given"
                          : "Names of the columns; x,y (of a single input x) unless given")
      ->option_text("NAME,NAME");
  command->add_option("--chunk", options.chunk, "Samples per chunk; contiguous, which reads fastest, unless given")
      ->transform(whole_number(1))
      ->option_text("N");
  command->add_option("--compress", options.compress, "Deflate, from 1 (fast) to 9 (small)")
      ->transform(whole_number(1, 9))
      ->option_text("LEVEL");
  command->add_option("--split", arguments->split, "Divide the samples, in their order, among OUT.NAME.h5")
      ->option_text("NAME=SHARE...");
  command->add_option("--shuffle", options.shuffle, "Put the samples into a random order first")
      ->transform(whole_number(0, std::numeric_limits<std::uint64_t>::max()))
      ->option_text("SEED");
  command->add_option("--per-class", options.per_class, "Keep the first N samples of each value of the last column")
      ->transform(whole_number(1))
      ->option_text("N");
  if (converter == convert_csv) {
    command
        ->add_option("--header", arguments->header,
                     "Whether the first line of each file is a header, which is skipped (yes or no); where its last "
                     "field is no number unless given")
        ->option_text("yes|no")
        ->check(CLI::IsMember({"yes", "no"}));
    command
        ->add_option("--type", arguments->types,
                     "Store a column as float32, float64 or int64; chosen by its numbers unless given")
        ->option_text("COLUMN=TYPE...");
  }
  command->add_flag("--json", arguments->json, "Print the result as JSON");
  command->footer("Example:\n  " + example);
  command->callback([converter, arguments] { convert(converter, *arguments); });
}

}  // namespace

void add_convert(CLI::App& app) {
  auto* command = app.add_subcommand("convert", "Make a dataset (HDF5) from other formats");
  command->require_subcommand(1);
  command->footer("Example:\n  muster convert idx images.gz labels.gz train.h5");
  add_format(*command, "idx", "Files of MNIST's format, gzipped or not; one column each",
             "muster convert idx images.gz labels.gz OUT.h5 --split train=0.9 test=0.1", convert_idx);
  add_format(*command, "npy", "NumPy's .npy files; one column each",
             "muster convert npy features.npy target.npy OUT.h5 --columns x,y", convert_npy);
  add_format(*command, "npz", "The arrays of one of NumPy's .npz archives, each a column with its name",
             "muster convert npz mnist.npz OUT.h5 --columns x_train,y_train --chunk 64", convert_npz);
  add_format(*command, "csv", "Comma-separated numbers, the target last",
             "muster convert csv housing.csv OUT.h5 --shuffle 1 --split train=0.8 test=0.2", convert_csv);
  add_format(*command, "h5", "Columns of an HDF5 file, into another layout",
             "muster convert h5 slow.h5 OUT.h5 --columns x,y --chunk 64", convert_h5);
  add_format(*command, "zarr", "Arrays of a Zarr store, a folder or a zip archive",
             "muster convert zarr era5.zarr OUT.h5 --columns t2m,u10", convert_zarr);
}

}  // namespace muster::tool
