#include "muster/error.hpp"
#include "muster/mixed_precision.hpp"

#include <ATen/autocast_mode.h>

#include <string>

namespace muster {

namespace autocast = at::autocast;

Autocast::Autocast(at::DeviceType device, const AutocastOptions& options)
    : device_(device),
      was_enabled_(autocast::is_autocast_enabled(device)),
      was_dtype_(autocast::get_autocast_dtype(device)) {
  if (options.dtype != at::kBFloat16 && options.dtype != at::kHalf)
    throw Error(ExitCode::usage, "starting autocast",
                std::string(c10::toString(options.dtype)) + " is not a type for it", "Use at::kBFloat16 or at::kHalf");
  autocast::set_autocast_enabled(device_, options.enabled);
  autocast::set_autocast_dtype(device_, options.dtype);
  autocast::increment_nesting();
}

Autocast::~Autocast() {
  // The casts of parameters are kept over the outermost scope, since they serve several operations; after it the
  // optimizer changes the parameters.
  if (autocast::decrement_nesting() == 0) autocast::clear_cache();
  autocast::set_autocast_enabled(device_, was_enabled_);
  autocast::set_autocast_dtype(device_, was_dtype_);
}

}  // namespace muster
