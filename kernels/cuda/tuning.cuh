// Sizes that were chosen, in one table. `sparsecomm/backends/cuda/tuning.py` reads them from here.
#pragma once

namespace sparsecomm {

constexpr unsigned SAMPLE_THREADS = 256;   // of a block that samples
constexpr unsigned SAMPLE_BINS = 8192;     // of the sample's histogram, over the whole range of keys
constexpr unsigned SAMPLE_SECTORS = 65536; // sectors of 32 bytes looked at, at most

constexpr unsigned FILTER_THREADS = 256;   // of a block that filters
constexpr unsigned FILTER_CHUNKS = 4;      // of 16 bytes, that each of its threads holds

constexpr unsigned BINS = 4096;            // of the candidates' histogram
constexpr unsigned REFINE_THREADS = 256;
constexpr unsigned EMIT_THREADS = 256;
constexpr unsigned EMIT_ITEMS = 8;         // candidates per thread

constexpr unsigned RADIX_THREADS = 512;    // of a block of the fallback
constexpr unsigned RADIX_BITS = 11;        // decided by each of its passes

constexpr unsigned MERGE_THREADS = 256;
constexpr unsigned MERGE_ITEMS = 8;        // entries of both vectors together, per thread

constexpr unsigned DENSE_THREADS = 256;
constexpr unsigned DENSIFY_TILE = 4096;    // elements of a tile that is written at once

constexpr unsigned PACKED_THREADS = 256;   // of a block that packs or unpacks; unpack: also words of a tile

}  // namespace sparsecomm
