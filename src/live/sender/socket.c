/* Sockets between processes of a node: their addresses, and messages that pass a file. */
#define _GNU_SOURCE

#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "live/sender/ring.h"

unsigned live_address(struct sockaddr_un* address, const char* token, const char* stream, int rank) {
  memset(address, 0, sizeof *address);
  address->sun_family = AF_UNIX;
  const int length =
      snprintf(address->sun_path + 1, sizeof address->sun_path - 1, "muster-live/%s/%s/%d", token, stream, rank);
  return (unsigned)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
}

int live_is_own_user(int socket) {
  struct ucred peer;
  socklen_t bytes = sizeof peer;
  return getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0 && peer.uid == geteuid();
}

/* A message with room for a file. */
struct parcel {
  union {
    struct cmsghdr align;
    char bytes[CMSG_SPACE(sizeof(int))];
  } control;
  struct iovec data;
  struct msghdr head;
};

static void prepare(struct parcel* parcel, void* bytes, size_t count) {
  memset(parcel, 0, sizeof *parcel);
  parcel->data = (struct iovec){bytes, count};
  parcel->head.msg_iov = &parcel->data;
  parcel->head.msg_iovlen = 1;
  parcel->head.msg_control = parcel->control.bytes;
  parcel->head.msg_controllen = sizeof parcel->control.bytes;
}

int live_send_file(int socket, const void* bytes, size_t count, int file) {
  struct parcel parcel;
  prepare(&parcel, (void*)bytes, count);
  struct cmsghdr* const part = CMSG_FIRSTHDR(&parcel.head);
  part->cmsg_level = SOL_SOCKET;
  part->cmsg_type = SCM_RIGHTS;
  part->cmsg_len = CMSG_LEN(sizeof file);
  memcpy(CMSG_DATA(part), &file, sizeof file);
  return sendmsg(socket, &parcel.head, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)count;
}

int64_t live_receive_file(int socket, void* bytes, size_t count, int* file) {
  struct parcel parcel;
  prepare(&parcel, bytes, count);
  *file = LIVE_NO_FILE;
  const ssize_t got = recvmsg(socket, &parcel.head, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return LIVE_NOTHING;
  if (got <= 0) return got;
  const struct cmsghdr* const part = CMSG_FIRSTHDR(&parcel.head);
  if (part != NULL && part->cmsg_type == SCM_RIGHTS)
    memcpy(file, CMSG_DATA(part), sizeof *file);
  else if (parcel.head.msg_flags & MSG_CTRUNC)
    *file = LIVE_LOST_FILE;
  return got;
}
