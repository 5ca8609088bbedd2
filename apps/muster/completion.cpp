// muster completion: writes scripts by which a shell completes the tool's commands and options. They are made from the
// tool's own definitions. A script finds the command that was typed so far ("muster convert csv") and offers what may
// follow. A word that is no command, such as a file, ends this search; after "--" nothing is offered, since a program
// follows.
#include "commands.hpp"

#include <algorithm>
#include <functional>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

namespace muster::tool {
namespace {

std::vector<const CLI::App*> commands_of(const CLI::App& app) {
  return app.get_subcommands(
      [](const CLI::App* command) { return !command->get_name().empty() && !command->get_group().empty(); });
}

/// Calls use(words, command) for the tool ("muster") and each command in it ("muster convert", "muster convert csv").
void for_each_command(const CLI::App& app, const std::string& words,
                      const std::function<void(const std::string&, const CLI::App&)>& use) {
  use(words, app);
  for (const auto* command : commands_of(app)) for_each_command(*command, words + " " + command->get_name(), use);
}

/// Calls use(word, description) for the commands and long options that may follow a command.
void for_each_choice(const CLI::App& command, const std::function<void(const std::string&, const std::string&)>& use) {
  for (const auto* sub : commands_of(command)) use(sub->get_name(), sub->get_description());
  for (const auto* option : command.get_options([](const CLI::Option* o) { return !o->get_group().empty(); }))
    for (const auto& name : option->get_lnames()) use("--" + name, option->get_description());
}

/// Returns the values that an option accepts, separated by spaces; empty if it accepts any.
std::string values_of(const CLI::Option& option) {
  const auto type = option.get_type_name();  // TEXT:{safetensors,torch}
  const auto begin = type.find('{'), end = type.rfind('}');
  if (begin == type.npos || end == type.npos) return {};
  auto values = type.substr(begin + 1, end - begin - 1);
  std::ranges::replace(values, ',', ' ');
  return values;
}

/// Calls use(option, values) for the long options of a command that accept only some values.
void for_each_list(const CLI::App& command, const std::function<void(const std::string&, const std::string&)>& use) {
  for (const auto* option : command.get_options([](const CLI::Option* o) { return !o->get_group().empty(); }))
    if (const auto values = values_of(*option); !values.empty())
      for (const auto& name : option->get_lnames()) use("--" + name, values);
}

/// Calls use(before, word) for each command `before` and each word that is one of its commands.
void for_each_step(const CLI::App& app, const std::function<void(const std::string&, const std::string&)>& use) {
  for_each_command(app, "muster", [&](const std::string& words, const CLI::App& command) {
    for (const auto* sub : commands_of(command)) use(words, sub->get_name());
  });
}

/// Prints the part of a script for bash and zsh that sets `typed` to the command so far. `earlier`: the words before
/// the completed one, without the first.
void print_search(const CLI::App& app, const std::string& earlier) {
  std::cout << "  local word typed=muster searching=yes\n"
               "  for word in "
            << earlier
            << "; do\n"
               "    case \"$searching $typed $word\" in\n"
               "      *' --') return ;;\n"
               "      *' -'*) ;;\n";
  for_each_step(app, [](const std::string& before, const std::string& word) {
    std::cout << "      'yes " << before << " " << word << "') typed='" << before << " " << word << "' ;;\n";
  });
  std::cout << "      *) searching=no ;;\n"
               "    esac\n"
               "  done\n";
}

/// Prints the part that sets the array `choices` to the words that may follow. `previous`: the word before the
/// completed one.
void print_choices(const CLI::App& app, const std::string& previous) {
  std::cout << "  case \"$typed\" in\n";
  for_each_command(app, "muster", [](const std::string& words, const CLI::App& command) {
    std::cout << "    '" << words << "') choices=(";
    for_each_choice(command, [](const std::string& word, const std::string&) { std::cout << " " << word; });
    std::cout << " ) ;;\n";
  });
  std::cout << "  esac\n  case \"$typed \"" << previous << " in\n";
  for_each_command(app, "muster", [](const std::string& words, const CLI::App& command) {
    for_each_list(command, [&](const std::string& option, const std::string& values) {
      std::cout << "    '" << words << " " << option << "') choices=( " << values << " ) ;;\n";
    });
  });
  std::cout << "  esac\n";
}

void print_bash(const CLI::App& app) {
  std::cout << "_muster() {\n"
               "  local -a choices\n";
  print_search(app, "\"${COMP_WORDS[@]:1:COMP_CWORD-1}\"");
  print_choices(app, "\"${COMP_WORDS[COMP_CWORD-1]}\"");
  std::cout << "  mapfile -t COMPREPLY < <(compgen -W \"${choices[*]}\" -- \"${COMP_WORDS[COMP_CWORD]}\")\n"
               "}\n"
               "complete -o default -F _muster muster\n";
}

void print_zsh(const CLI::App& app) {
  std::cout << "#compdef muster\n"
               "_muster() {\n"
               "  local -a choices\n";
  print_search(app, "\"${(@)words[2,CURRENT-1]}\"");
  print_choices(app, "\"${words[CURRENT-1]}\"");
  // If the script is a file in $fpath, zsh calls it as a function; in a running shell it is sourced.
  std::cout << "  compadd -- $choices\n"
               "  _files\n"
               "}\n"
               "if [ \"${funcstack[1]}\" = _muster ]; then\n"
               "  _muster \"$@\"\n"
               "else\n"
               "  (( $+functions[compdef] )) || { autoload -Uz compinit && compinit }\n"
               "  compdef _muster muster\n"
               "fi\n";
}

std::string quoted(const std::string& text) {
  std::string result = "'";
  for (const char c : text) result += c == '\'' ? "\\'" : c == '\\' ? "\\\\" : std::string(1, c == '\n' ? ' ' : c);
  return result + "'";
}

void print_fish(const CLI::App& app) {
  std::cout << "function __muster_typed\n"
               "  set -l typed muster\n"
               "  set -l searching yes\n"
               "  set -l words (commandline -opc)\n"
               "  for word in $words[2..]\n"
               "    switch \"$searching $typed $word\"\n"
               "      case '* --'\n"
               "        return\n"
               "      case '* -*'\n";
  for_each_step(app, [](const std::string& before, const std::string& word) {
    std::cout << "      case 'yes " << before << " " << word << "'\n        set typed '" << before << " " << word
              << "'\n";
  });
  std::cout << "      case '*'\n"
               "        set searching no\n"
               "    end\n"
               "  end\n"
               "  echo $typed\n"
               "end\n";
  for_each_command(app, "muster", [](const std::string& words, const CLI::App& command) {
    for_each_choice(command, [&](const std::string& word, const std::string& description) {
      std::cout << "complete -c muster -n 'test \"$(__muster_typed)\" = \"" << words << "\"' "
                << (word.starts_with("--") ? "-l " + word.substr(2) : "-a " + word) << " -d " << quoted(description)
                << "\n";
    });
    for_each_list(command, [&](const std::string& option, const std::string& values) {
      std::cout << "complete -c muster -n 'test \"$(__muster_typed)\" = \"" << words << "\"' -l " << option.substr(2)
                << " -x -a " << quoted(values) << "\n";
    });
  });
}

void print(const CLI::App& app, const std::string& shell) {
  if (shell == "bash")
    print_bash(app);
  else if (shell == "zsh")
    print_zsh(app);
  else
    print_fish(app);
}

}  // namespace

void add_completion(CLI::App& app) {
  auto shell = std::make_shared<std::string>();
  auto* command = app.add_subcommand("completion", "Print a script with which a shell completes this command");
  command->add_option("shell", *shell, "bash, zsh or fish")
      ->option_text("SHELL")
      ->required()
      ->check(CLI::IsMember({"bash", "zsh", "fish"}));
  command->footer("Example:\n  muster completion bash > ~/.local/share/bash-completion/completions/muster");
  command->callback([&app, shell] { print(app, *shell); });
}

}  // namespace muster::tool
