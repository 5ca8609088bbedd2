// Preloaded into a program, starts it again and again without loading its libraries again, which for libtorch takes
// most of a short start: the loaded process waits before main() and forks for each command, and main() runs in the
// fork.
//   MUSTER_TEST_FORKS=FD LD_PRELOAD=libmuster_forks.so PROGRAM
// FD is a socket that keeps messages apart. A message holds the descriptors 0, 1 and 2 of a command, and, each ended by
// a null byte, its working directory, the number of its words, the words, and its environment. The answers are two
// numbers of four bytes: the process id, and, once it has ended, the status that waitpid() gives. See command_lines.py.
// With MUSTER_TEST_TRACED in the environment, the descriptor 0 is a socket, and the fork waits for its tracer; see
// kill_at.cpp.
#include "support/changing_calls.hpp"

#include <dlfcn.h>
#include <errno.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

using Main = int (*)(int, char**, char**);
using Start = int (*)(Main, int, char**, void (*)(), void (*)(), void (*)(), void*);

constexpr int not_possible = 126;

// A program may need these until its last moment, so they are never destroyed.
auto& message = *new std::vector<char>(1 << 20);
auto& words = *new std::vector<char*>;  // argv, then the environment, each ended by a null pointer
int word_count = 0;

/// Returns the length, or 0 if the test has ended.
std::size_t receive(int socket, int (&streams)[3]) {
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(streams))];
  iovec data{message.data(), message.size()};
  msghdr header{};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof(control);
  const auto length = ::recvmsg(socket, &header, MSG_CMSG_CLOEXEC);
  if (length <= 0) return 0;
  const auto* rights = CMSG_FIRSTHDR(&header);
  if ((header.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0 || rights == nullptr) ::_exit(not_possible);
  std::memcpy(streams, CMSG_DATA(rights), sizeof(streams));
  return static_cast<std::size_t>(length);
}

void become(std::size_t length, const int (&streams)[3]) {
  for (int i = 0; i < 3; ++i)
    if (::dup2(streams[i], i) < 0) ::_exit(not_possible);
  for (const int stream : streams) ::close(stream);
  std::vector<char*> texts;
  for (std::size_t at = 0; at < length; at += std::strlen(message.data() + at) + 1)
    texts.push_back(message.data() + at);
  if (texts.size() < 2 || ::chdir(texts[0]) != 0) ::_exit(not_possible);
  word_count = std::atoi(texts[1]);
  words.assign(texts.begin() + 2, texts.end());
  words.insert(words.begin() + word_count, nullptr);
  words.push_back(nullptr);
  ::environ = words.data() + word_count + 1;
  program_invocation_name = words[0];
  const auto* slash = std::strrchr(words[0], '/');
  program_invocation_short_name = slash == nullptr ? words[0] : words[0] + (slash - words[0]) + 1;
  if (std::getenv("MUSTER_TEST_TRACED") != nullptr && !muster::test::stop_at_changing_calls(0)) ::_exit(not_possible);
}

/// Returns in each fork.
void serve(int socket) {
  for (;;) {
    int streams[3];
    const auto length = receive(socket, streams);
    if (length == 0) ::_exit(0);
    const std::int32_t process = ::fork();
    if (process == 0) {
      ::close(socket);
      return become(length, streams);
    }
    for (const int stream : streams) ::close(stream);
    int status = 0;
    if (process < 0 || ::send(socket, &process, sizeof(process), 0) < 0 || ::waitpid(process, &status, 0) != process ||
        ::send(socket, &status, sizeof(status), 0) < 0)
      ::_exit(not_possible);
  }
}

}  // namespace

/// Called when all libraries are loaded, with the program's main().
extern "C" __attribute__((visibility("default"))) int __libc_start_main(Main main, int argc, char** argv,
                                                                        void (*init)(), void (*fini)(),
                                                                        void (*loader_fini)(), void* stack_end) {
  if (const char* socket = std::getenv("MUSTER_TEST_FORKS")) {
    serve(std::atoi(socket));
    argc = word_count;
    argv = words.data();
  }
  return reinterpret_cast<Start>(::dlsym(RTLD_NEXT, "__libc_start_main"))(main, argc, argv, init, fini, loader_fini,
                                                                          stack_end);
}
