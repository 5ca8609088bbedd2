// muster completion: scripts with which a shell completes the tool's commands and options, made from their definitions.
#include "commands.hpp"

#include <muster/error.hpp>

#include <functional>
#include <iostream>
#include <memory>
#include <string>

namespace muster::tool {
namespace {

/// Calls use(path, command) for the tool ("") and each command in it ("convert", "convert csv").
void for_each_command(const CLI::App& app, const std::string& path,
                      const std::function<void(const std::string&, const CLI::App&)>& use) {
  use(path, app);
  for (const auto* command : app.get_subcommands([](const CLI::App* one) { return !one->get_name().empty(); }))
    for_each_command(*command, path + (path.empty() ? "" : " ") + command->get_name(), use);
}

/// The long options and the commands that may follow a command.
std::string words_after(const CLI::App& command) {
  std::string words;
  for (const auto* sub : command.get_subcommands([](const CLI::App*) { return true; })) words += sub->get_name() + " ";
  for (const auto* option : command.get_options())
    for (const auto& name : option->get_lnames()) words += "--" + name + " ";
  if (!words.empty()) words.pop_back();
  return words;
}

/// After `muster run` and its options comes any program, so files complete there.
void print_bash(const CLI::App& app) {
  std::cout << "_muster() {\n"
               "  local word path= words=\n"
               "  for word in \"${COMP_WORDS[@]:1:COMP_CWORD-1}\"; do\n"
               "    case \"$path $word\" in\n";
  for_each_command(app, "", [](const std::string& path, const CLI::App&) {
    if (!path.empty()) std::cout << "      \" " << path << "\") path=\" " << path << "\" ;;\n";
  });
  std::cout << "    esac\n"
               "  done\n"
               "  case \"$path\" in\n";
  for_each_command(app, "", [](const std::string& path, const CLI::App& command) {
    std::cout << "    \"" << (path.empty() ? "" : " " + path) << "\") words=\"" << words_after(command) << "\" ;;\n";
  });
  std::cout << "  esac\n"
               "  mapfile -t COMPREPLY < <(compgen -W \"$words\" -- \"${COMP_WORDS[COMP_CWORD]}\")\n"
               "}\n"
               "complete -o default -F _muster muster\n";
}

std::string quoted(const std::string& text) {
  std::string result = "'";
  for (const char c : text) result += c == '\'' ? "\\'" : c == '\\' ? "\\\\" : std::string(1, c == '\n' ? ' ' : c);
  return result + "'";
}

void print_fish(const CLI::App& app) {
  // True where exactly these commands have been typed.
  std::cout << "function __muster_after\n"
               "  set -l typed (string match -rv -- '^-' (commandline -opc)[2..-1])\n"
               "  test \"$typed[1..\"(count $argv)\"]\" = \"$argv\"; or test (count $argv) = 0 -a (count $typed) = 0\n"
               "end\n";
  for_each_command(app, "", [](const std::string& path, const CLI::App& command) {
    const auto where = "complete -c muster -n '__muster_after " + path + "' ";
    for (const auto* sub : command.get_subcommands([](const CLI::App*) { return true; }))
      std::cout << where << "-a " << sub->get_name() << " -d " << quoted(sub->get_description()) << "\n";
    for (const auto* option : command.get_options())
      for (const auto& name : option->get_lnames())
        std::cout << where << "-l " << name << " -d " << quoted(option->get_description()) << "\n";
  });
}

void print(const CLI::App& app, const std::string& shell) {
  if (shell == "fish") return print_fish(app);
  if (shell == "zsh") std::cout << "autoload -U +X bashcompinit && bashcompinit\n";
  print_bash(app);
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
