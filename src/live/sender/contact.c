/* The file by which solvers of other jobs find a trainer. */
#define _GNU_SOURCE

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include "live/sender/ring.h"

int live_write_contact(const char* path, const live_contact* contact) {
  char unfinished[4096];
  if (snprintf(unfinished, sizeof unfinished, "%s.%ld", path, (long)getpid()) >= (int)sizeof unfinished)
    return ENAMETOOLONG;
  unlink(unfinished); /* of a process with this number that was killed */
  const int file = open(unfinished, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (file < 0) return errno;
  const ssize_t written = write(file, contact, sizeof *contact);
  int error = written == (ssize_t)sizeof *contact ? 0 : written < 0 ? errno : ENOSPC;
  close(file);
  if (error == 0 && rename(unfinished, path) != 0) error = errno;
  if (error != 0) unlink(unfinished);
  return error;
}

int live_read_contact(const char* path, live_contact* contact) {
  const int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a pipe would wait */
  if (file < 0) return 0;
  const ssize_t got = read(file, contact, sizeof *contact);
  close(file);
  return got == (ssize_t)sizeof *contact && contact->trainers > 0 &&
         memchr(contact->token, 0, sizeof contact->token) != NULL && memchr(contact->name, 0, sizeof contact->name);
}
