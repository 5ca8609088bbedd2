// The hosts that a start leaves out, and whether they answer again.
#pragma once

#include "supervise/launchers/launchers.hpp"

#include <array>
#include <chrono>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace muster::detail::supervise {

/// The variables in which a launcher is told the program by which it logs in to other hosts.
inline constexpr std::array login_variables{"OMPI_MCA_plm_rsh_agent", "PRTE_MCA_plm_ssh_agent", "HYDRA_LAUNCHER_EXEC"};
/// That program with its arguments, or ssh.
std::vector<std::string> login_program(const Environment& environment);

/// What ssh says of a host that it cannot reach begins with one of these; the host's name follows.
inline constexpr std::array<std::string_view, 2> ssh_failures{"ssh: connect to host ",
                                                              "ssh: Could not resolve hostname "};

/// Asks the lost hosts from time to time, by logging in to them, whether they answer again. Each time that a host is
/// lost, it is asked later.
class LostHosts {
 public:
  using Clock = std::chrono::steady_clock;

  /// `login`: see login_program(); empty where hosts that are lost do not come back.
  explicit LostHosts(std::vector<std::string> login) : login_(std::move(login)) {}
  LostHosts(const LostHosts&) = delete;
  LostHosts& operator=(const LostHosts&) = delete;
  ~LostHosts() { stop_asking(); }

  const Hosts& hosts() const noexcept { return hosts_; }
  void add(const std::string& host);
  void replace(Hosts hosts) { hosts_ = std::move(hosts); }
  void remove(const Hosts& hosts);

  /// Asks the hosts whose time has come, and reads the answers; to be called often, and does not wait. Returns the
  /// hosts that have answered.
  Hosts answering();
  static constexpr std::chrono::seconds answer_timeout{6};  ///< ssh waits for 5 s
  /// Asks all of them and `others`, and waits for their answers for a few seconds. Removes those that answer. Returns
  /// those of `others` that cannot be reached, with what ssh says, and those that do not answer, with an empty text.
  std::map<std::string, std::string> ask_all(const Hosts& others, std::chrono::seconds timeout = answer_timeout);
  /// The host that has answered that this is its name; empty if none has. `name`: see short_name().
  std::string host_called(const std::string& name) const;

 private:
  struct Asked {
    std::string host;
    int answer = -1;  ///< a pipe from the login program
    pid_t process = -1;
    std::string text = {};  ///< read from it
  };
  void ask(const std::string& host);
  std::vector<Asked> read_answers();
  void stop_asking();

  std::vector<std::string> login_;
  Hosts hosts_;
  std::map<std::string, Clock::time_point> next_question_;
  std::map<std::string, int> times_lost_;
  std::map<std::string, std::string> hosts_by_name_;  ///< by the short names that they have answered
  std::vector<Asked> asked_;
};

}  // namespace muster::detail::supervise
