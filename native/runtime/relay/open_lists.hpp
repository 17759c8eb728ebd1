// Long lists of headers of the streams of one connection that the server has not ended: it holds them so long.
#pragma once
#include <stdint.h>
#include <stdlib.h>

namespace tw {

constexpr uint32_t kStreams = 1024;     // a power of two, and more than the server lets a connection have
constexpr uint32_t kShortList = 1024;   // bytes of a list that are not counted: about what any call costs besides

// Bytes by stream, which are found by linear probing.
struct OpenLists {
  struct Entry {
    uint32_t stream, bytes;  // stream 0: free
  };
  Entry* entries;
  uint32_t count;
  uint64_t bytes;  // of all

  // False: there are too many, or there is no memory.
  bool add(uint32_t stream, uint32_t more) {
    if (!entries && !(entries = (Entry*)calloc(kStreams, sizeof(Entry)))) return false;
    uint32_t at = place(stream);
    while (entries[at].stream && entries[at].stream != stream) at = next(at);
    if (!entries[at].stream) {
      if (count + 1 == kStreams) return false;  // one stays free, which ends each search
      count += 1;
      entries[at].stream = stream;
    }
    entries[at].bytes += more;
    bytes += more;
    return true;
  }

  // Bytes of a stream that has ended.
  uint32_t remove(uint32_t stream) {
    if (!count || !stream) return 0;
    uint32_t at = place(stream);
    while (entries[at].stream != stream) {
      if (!entries[at].stream) return 0;
      at = next(at);
    }
    const uint32_t had = entries[at].bytes;
    for (uint32_t after = next(at); entries[after].stream; after = next(after)) {
      // One that was put behind its place because of this one moves up.
      if (((after - place(entries[after].stream)) & (kStreams - 1)) < ((after - at) & (kStreams - 1))) continue;
      entries[at] = entries[after];
      at = after;
    }
    entries[at] = {0, 0};
    count -= 1;
    bytes -= had;
    return had;
  }

 private:
  static uint32_t place(uint32_t stream) { return stream >> 1 & (kStreams - 1); }
  static uint32_t next(uint32_t at) { return (at + 1) & (kStreams - 1); }
};

}  // namespace tw
