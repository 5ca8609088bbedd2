#include "command_line.hpp"

#include "interrupt.hpp"
#include "text.hpp"

#include <muster/error.hpp>
#include <muster/version.hpp>

#include <algorithm>
#include <charconv>
#include <exception>
#include <filesystem>
#include <iostream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

namespace muster::tool {
namespace {

/// Prints examples unchanged, positional arguments only by their texts ("IN... OUT.h5"), and descriptions in the
/// columns that are left of 80.
class Help : public CLI::Formatter {
 public:
  Help() { column_width(first_columns); }
  std::string make_option_desc(const CLI::Option* option) const override {
    return in_last_columns(CLI::Formatter::make_option_desc(option));
  }
  std::string make_subcommand(const CLI::App* command) const override {
    std::ostringstream out;
    CLI::detail::format_help(out, command->get_name(), in_last_columns(command->get_description()), first_columns);
    return out.str();
  }
  std::string make_footer(const CLI::App* app) const override { return app->get_footer() + "\n"; }
  std::string make_option_usage(const CLI::Option* option) const override { return option->get_option_text(); }
  std::string make_option_name(const CLI::Option* option, bool positional) const override {
    return positional ? option->get_option_text() : CLI::Formatter::make_option_name(option, positional);
  }
  std::string make_option_opts(const CLI::Option* option) const override {
    return option->get_positional() ? "" : CLI::Formatter::make_option_opts(option);
  }

 private:
  static constexpr std::size_t first_columns = 28;
  static std::string in_last_columns(const std::string& text) {
    std::string lines;
    for (const auto& line : wrapped(text, line_width - first_columns)) lines += (lines.empty() ? "" : "\n") + line;
    return lines;
  }
};

int fail(ExitCode code, const std::string& text) {
  std::cerr << "muster: " << printable(text) << std::endl;
  return static_cast<int>(code);
}

/// The innermost subcommand on the command line: "muster convert idx".
std::string named_command(const CLI::App& app) {
  const auto named = app.get_subcommands();
  return app.get_name() + (named.empty() ? "" : " " + named.front()->get_name()) +
         (named.empty() || named.front()->get_subcommands().empty()
              ? ""
              : " " + named.front()->get_subcommands().front()->get_name());
}

/// The words of the command line, the last one first. Behind "--" only files are named; with "./" before it, CLI11
/// takes no name for an option, wherever it stands in a list.
std::vector<std::string> words_of(int argc, char** argv) {
  std::vector<std::string> words(argv + 1, argv + argc);
  if (const auto mark = std::ranges::find(words, "--"); mark != words.end() && words.front() == "convert") {
    for (auto word = mark + 1; word != words.end(); ++word)
      if (word->starts_with("-")) *word = "./" + *word;
    words.erase(mark);
  }
  std::ranges::reverse(words);
  return words;
}

int run(const std::string& name, const std::string& description, int argc, char** argv,
        const std::function<void(CLI::App&)>& add) {
  CLI::App app(description, name);
  app.formatter(std::make_shared<Help>());
  app.set_version_flag("--version", "muster " MUSTER_VERSION);
  app.require_subcommand(1);
  add(app);
  try {
    app.parse(words_of(argc, argv));
  } catch (const CLI::RuntimeError& ended) {  // the error has been printed already
    return ended.get_exit_code();
  } catch (const CLI::ParseError& error) {
    const auto named = app.get_subcommands();
    if (const auto words = app.remaining(); !words.empty() && named.empty())
      return fail(ExitCode::usage, "there is no command \"" + words.front() + "\". `" + name + " --help` lists them");
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    // An option that stands before "--" is not one of the program behind it.
    const auto extra = app.remaining(/*recurse=*/true);
    if (const auto mark = std::ranges::find(extra, "--"); mark != extra.begin() && mark != extra.end())
      return fail(ExitCode::usage,
                  "there is no option " + extra.front() + ". `" + named_command(app) + " --help` lists the options");
    if (!named.empty() && named.front()->get_name() == "run" &&
        dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr)
      return fail(ExitCode::usage, std::string(error.what()) + ". For a flag of the program put -- before the program");
    return fail(ExitCode::usage, std::string(error.what()) + ". `" + named_command(app) + " --help` lists the options");
  }
  if (!std::cout.flush())
    return fail(ExitCode::retry,
                "writing the result: standard output does not take it. Check the space and the permissions there");
  return 0;
}

}  // namespace

CLI::Validator whole_number(std::uint64_t least, std::uint64_t most) {
  const auto check = [=](std::string& text) -> std::string {
    std::uint64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size() || value < least || value > most)
      return "\"" + text + "\" is no whole number from " + std::to_string(least) + " to " + std::to_string(most);
    text = std::to_string(value);  // CLI11 takes 010 for 8
    return {};
  };
  return {check, ""};
}

int run_command_line(const std::string& name, const std::string& description, int argc, char** argv,
                     const std::function<void(CLI::App&)>& add) {
  try {
    return run(name, description, argc, argv, add);
  } catch (const Interrupted& interrupted) {
    std::cerr << "muster: stopped by a signal; " << interrupted.remains << "\n";
    return interrupted.exit_code;
  } catch (const Error& error) {
    return fail(error.code(), error.what());
  } catch (const std::filesystem::filesystem_error& error) {
    const auto path = error.path1().string();
    return fail(ExitCode::data, path.empty() ? error.what() : path + ": " + error.code().message());
  } catch (const std::exception& error) {
    return fail(ExitCode::user_error, error.what());
  }
}

}  // namespace muster::tool
