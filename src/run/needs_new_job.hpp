// A failure that only a new start of the job can mend.
#pragma once

#include "muster/error.hpp"

namespace muster::detail::run {

/// An error after which no other attempt in this job can succeed. The trainer makes none, and ends with the error.
class NeedsNewJob : public Error {
 public:
  explicit NeedsNewJob(const Error& error) : Error(error) {}
};

}  // namespace muster::detail::run
