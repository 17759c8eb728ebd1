// The bytes of launch plans and bundles; docs/protocol.md has the same in prose. Little-endian, every section at a
// multiple of 8 bytes, in the order of the structs below.
#pragma once
#include <stdint.h>

namespace tw {

constexpr uint32_t kFormatVersion = 1;
constexpr char kPlanMagic[8] = {'T', 'W', 'P', 'L', 'A', 'N', 0, 0};
constexpr char kBundleMagic[8] = {'T', 'W', 'B', 'N', 'D', 'L', 0, 0};
constexpr uint32_t kMaxRank = 8;
constexpr uint32_t kImageAlignment = 64;

// A launch plan: this, operands, stages, objects, relocations, maps, pairs, dims (int64), strings (each ends with a
// zero byte), and at a multiple of 64 bytes the image: all argument blocks, with holes.
struct PlanHeader {
  char magic[8];
  uint32_t version;
  uint32_t header_bytes;
  uint64_t bytes;      // of the whole plan
  uint8_t digest[32];  // SHA-256 of everything behind this field
  uint32_t device_kind;
  uint32_t team;
  uint32_t operands, stages, objects, relocations, maps, pairs;
  uint32_t dims;
  uint32_t string_bytes;
  uint64_t workspace_bytes;
  uint64_t counter_bytes;
  uint64_t flops;
  uint64_t image_bytes;
  uint64_t tables_at;  // on a GPU: what lies from here on in the image lies in device memory
  uint32_t operation, arch, name;  // offsets into the strings
  uint32_t features;               // offset of the CPU features that are needed, separated by commas
};

struct OperandRecord {
  uint32_t name, dtype;
  uint32_t role;
  uint32_t rank;
  uint32_t dims;  // index of the first of `rank` sizes, behind which come as many strides; both in elements
  uint32_t alignment;
  uint64_t span_bytes;
};

constexpr uint32_t kDependent = 1;  // StageRecord.flags: may begin before the stage before it has ended

struct StageRecord {
  uint32_t object;  // index
  uint32_t symbol;  // offset into the strings
  uint32_t team;
  uint32_t flags;
  uint32_t grid[3], block[3], cluster[3];
  uint32_t shared_bytes;
  uint64_t root;  // offset in the image of the arguments, which go by value on a GPU
  uint64_t root_bytes;
};

struct ObjectRecord {
  uint8_t sha256[32];
  uint64_t bytes;
};

// The word at `offset` of the image becomes the address of `place` plus `addend`. Places are the operands in their
// order, then the workspace, the counters, and the tables (on a CPU: the image itself).
struct RelocationRecord {
  uint64_t offset;
  int64_t addend;
  uint32_t place;
  uint32_t reserved;
};

// A tensor map of 128 bytes at `offset` of the image. Types, swizzle and fetch are the driver's numbers.
struct MapRecord {
  uint64_t offset;
  int64_t addend;
  uint32_t place;
  uint32_t dtype;
  uint32_t rank;
  uint32_t swizzle;
  uint32_t fetch;
  uint32_t im2col;  // 1: the box is channels and pixels, and lower, upper, step are by spatial dimension
  uint64_t sizes[5];
  uint64_t strides[4];
  uint32_t box[5];
  int32_t lower[3], upper[3];
  uint32_t step[3];
};

// Spans that must not meet; `same` allows both to begin at one address.
struct PairRecord {
  uint32_t output, other;
  uint32_t same;
  uint32_t reserved;
};

// A bundle: this, entries sorted by name and arch, objects sorted by hash, strings, then plans and code objects.
struct BundleHeader {
  char magic[8];
  uint32_t version;
  uint32_t header_bytes;
  uint64_t bytes;
  uint8_t digest[32];  // SHA-256 of everything from behind this field to the end of the strings
  uint32_t entries, objects;
  uint64_t string_bytes;
};

struct BundleEntry {
  uint32_t name, arch, details;  // offsets into the strings; details are JSON, for tools and servers
  uint32_t reserved;
  uint64_t offset, bytes;
};

struct BundleObject {
  uint8_t sha256[32];
  uint64_t offset, bytes;
};

static_assert(sizeof(PlanHeader) == 152 && sizeof(OperandRecord) == 32 && sizeof(StageRecord) == 72, "packed records");
static_assert(sizeof(ObjectRecord) == 40 && sizeof(RelocationRecord) == 24 && sizeof(MapRecord) == 168, "");
static_assert(sizeof(PairRecord) == 16 && sizeof(BundleHeader) == 72 && sizeof(BundleEntry) == 32, "");
static_assert(sizeof(BundleObject) == 48, "");

}  // namespace tw
