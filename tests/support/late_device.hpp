// A device for tests, in the memory of this process, whose streams work as late as they may, or as early. A wait that
// is missing makes tests fail that would pass by luck on a real device.
//
// The device is PrivateUse1. Its operators are those that copies need.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>

namespace muster::test::late_device {

/// When the streams from the pool do what they were given. The default stream always works as late as it may.
enum class Pool {
  late,  ///< when a thread or another stream waits for it
  early  ///< at once
};

/// Registers the device, once in a process.
void install();
c10::Device device();
void set_pool(Pool pool);
/// Has all streams do all that they were given.
void finish();

/// Since the program began.
struct Counts {
  std::int64_t copies_from_pinned = 0;    ///< asynchronous
  std::int64_t copies_from_pageable = 0;  ///< the thread waits for these
  std::int64_t thread_waits = 0;          ///< for an event, a stream or a copy
  std::int64_t waits_of_this_thread = 0;
  std::int64_t stream_waits = 0;   ///< of a stream for an event
  std::int64_t records = 0;        ///< of memory on a stream
  std::int64_t pinned_pieces = 0;  ///< of pinned memory that were allocated
  std::int64_t pinned_in_use = 0;  ///< those that are not freed
  std::int64_t lost_copies = 0;    ///< from pinned memory that was freed before
};
Counts counts();

}  // namespace muster::test::late_device
