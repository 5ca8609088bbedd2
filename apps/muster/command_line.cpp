#include "command_line.hpp"

#include "base/text.hpp"
#include "interrupt.hpp"
#include "text.hpp"

#include <muster/error.hpp>
#include <muster/version.hpp>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <exception>
#include <filesystem>
#include <iostream>
#include <memory>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

namespace muster::tool {
namespace {

/// Formats --help: examples unchanged, positional arguments as their own texts ("IN... OUT.h5"), and descriptions
/// broken into lines in columns 29 to 80.
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

/// Returns the innermost command of the command line: "muster convert idx".
std::string named_command(const CLI::App& app) {
  const auto named = app.get_subcommands();
  return app.get_name() + (named.empty() ? "" : " " + named.front()->get_name()) +
         (named.empty() || named.front()->get_subcommands().empty()
              ? ""
              : " " + named.front()->get_subcommands().front()->get_name());
}

/// Returns the words of the command line, the last one first, as CLI11 wants them. For `convert`, the words behind "--"
/// are names of files; names that begin with "-" get "./" in front, so that CLI11 does not take them for options.
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

/// Returns the command's option for a word like "-n", "-n2" or "--name=x"; null if it has none.
const CLI::Option* find_option(const CLI::App& command, const std::string& word) {
  return command.get_option_no_throw(word.starts_with("--") ? word.substr(0, word.find('=')) : word.substr(0, 2));
}

bool looks_like_option(const std::string& word) {
  return word.size() > 1 && word.front() == '-' && !std::isdigit(word[1]) && word[1] != '.';
}

/// Returns a word like "--name=", for which CLI11 would take the next word as the value; empty if there is none.
std::string option_without_value(int argc, char** argv) {
  for (int i = 1; i < argc && std::string_view(argv[i]) != "--"; ++i)
    if (const std::string_view word = argv[i]; word.starts_with("--") && word.find('=') == word.size() - 1)
      return std::string(word);
  return {};
}

/// For a command that starts the program behind "--": returns what is wrong with the words before "--"; empty if
/// nothing is. (CLI11's message would name the program, or the word after the option.)
std::string wrong_word(const CLI::App& app, int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  const auto mark = std::ranges::find(words, "--");
  if (mark == words.end() || app.get_subcommands().empty()) return {};
  const CLI::App& command = *app.get_subcommands().front();
  if (command.get_option_no_throw("command") == nullptr) return {};  // the command starts no program
  const auto begin = std::ranges::find(words, command.get_name());
  const auto help = "`" + named_command(app) + " --help` lists the options";
  for (auto word = words.begin(); word != mark; ++word) {
    if (!looks_like_option(*word)) {
      if (word <= begin) continue;
      return "\"" + *word + "\" stands before --, and the program follows behind it. " + help;
    }
    const auto* const option = find_option(word < begin ? app : command, *word);
    if (option == nullptr && word < begin && find_option(command, *word) != nullptr)
      return "the option " + *word + " stands before the command. Write it behind `" + named_command(app) + "`";
    if (option == nullptr) return "there is no option " + *word + ". " + help;
    if (option->get_items_expected_min() == 0) continue;
    const bool has_value_in_next = word->starts_with("--") ? word->find('=') == std::string::npos : word->size() == 2;
    if (has_value_in_next && (word + 1 == mark || looks_like_option(word[1])))
      return "the option " + *word + " needs a value. " + help;
    if (has_value_in_next) ++word;
  }
  return {};
}

/// Describes a word that is no command: `command "convert x"`, or `option --x`.
std::string unknown(const std::string& word, const std::string& command) {
  return looks_like_option(word) ? "option " + word : "command \"" + command + "\"";
}

/// Returns the first word that was given where the command expects one of its own commands; empty if there is none.
std::string unknown_command(const CLI::App& command) {
  const bool has_commands = !command.get_subcommands([](const CLI::App*) { return true; }).empty();
  const auto words = command.remaining();
  return has_commands && command.get_subcommands().empty() && !words.empty() ? words.front() : "";
}

int run(const std::string& name, const std::string& description, int argc, char** argv,
        const std::function<void(CLI::App&)>& add) {
  CLI::App app(description, name);
  app.formatter(std::make_shared<Help>());
  app.set_version_flag("--version", "muster " MUSTER_VERSION);
  app.require_subcommand(1);
  add(app);
  if (const auto option = option_without_value(argc, argv); !option.empty())
    return fail(ExitCode::usage, "the option " + option + " has no value. Give it one");
  try {
    app.parse(words_of(argc, argv));
  } catch (const CLI::RuntimeError& ended) {  // the error was printed already
    return ended.get_exit_code();
  } catch (const CLI::ParseError& error) {
    const auto named = app.get_subcommands();
    if (const auto words = app.remaining(); !words.empty() && named.empty())
      return fail(ExitCode::usage,
                  "there is no " + unknown(words.front(), words.front()) + ". `" + name + " --help` lists them");
    if (error.get_exit_code() == 0) return app.exit(error);  // for --help and --version
    if (const auto wrong = wrong_word(app, argc, argv); !wrong.empty()) return fail(ExitCode::usage, wrong);
    if (const auto word = named.empty() ? "" : unknown_command(*named.front()); !word.empty())
      return fail(ExitCode::usage, "there is no " + unknown(word, named.front()->get_name() + " " + word) + ". `" +
                                       named_command(app) + " --help` lists them");
    if (!named.empty() && named.front()->get_name() == "run" &&
        dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr)
      return fail(ExitCode::usage, detail::str(error.what(), ". For a flag of the program put -- before the program"));
    return fail(ExitCode::usage, detail::str(error.what(), ". `", named_command(app), " --help` lists the options"));
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
      return detail::str("\"", text, "\" is no whole number from ", least, " to ", most);
    text = std::to_string(value);  // CLI11 would read 010 as 8
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
