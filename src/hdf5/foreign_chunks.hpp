// Chunks that HDF5 does not read. An HDF5 file in memory describes data of another format, so that all code for types,
// attributes and dimensions serves that format, too. The chunks of its datasets lie outside of this file.
#pragma once

#include "base/export.hpp"
#include "hdf5/handle.hpp"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace muster::detail::hdf5 {

/// The chunks of one dataset, numbered as by ChunkIndex. Thread-safe; needs no lock of HDF5.
class ForeignChunks {
 public:
  virtual ~ForeignChunks() = default;
  /// Decodes a chunk into memory of the size of a whole chunk. A chunk that is not there has the fill value. Throws an
  /// Error with ExitCode::data if it is damaged, or ExitCode::retry if the disk could not be read.
  virtual void read(std::int64_t number, std::span<std::byte> into) const = 0;
  /// Asks the system to begin reading the chunk. Failures are ignored.
  virtual void will_read(std::int64_t number) const noexcept = 0;
  /// The codecs, for people: "blosc lz4".
  virtual const std::string& codecs() const noexcept = 0;

  /// How much is stored. stored() looks at the files of about `most` chunks, at fixed places, and estimates the rest.
  struct Stored {
    std::uint64_t bytes = 0;
    bool is_whole = true;        ///< none of the chunks that stored() has looked at is missing
    std::uint32_t checksum = 0;  ///< of the metadata and of the sizes of the chunks that stored() has looked at
  };
  virtual Stored stored(std::int64_t most) const = 0;
};

/// The chunks of a dataset that lie outside of the HDF5 file; null if they lie in it.
MUSTER_INTERNAL_API std::shared_ptr<const ForeignChunks> foreign_chunks(hid_t dataset);

}  // namespace muster::detail::hdf5
