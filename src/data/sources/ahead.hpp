// How stored blocks of samples are prepared before they are read.
#pragma once

namespace muster::detail::data {

/// `request` has the system begin to read the blocks from the disk and does not wait; `decode` reads and decodes them.
enum class Ahead { request, decode };

}  // namespace muster::detail::data
