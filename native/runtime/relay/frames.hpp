// Frames of HTTP/2 that one process sends, counted and held to rates.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "relay/header_lists.hpp"
#include "relay/open_lists.hpp"
#include "relay/relay.h"

namespace tw {

// Tokens that come at a rate and are taken one by one. Times are nanoseconds.
struct Bucket {
  double tokens;
  uint64_t at;

  void fill(const tw_relay_rate& rate, uint64_t now) {
    tokens += (double)(now - at) * 1e-9 * rate.a_second;
    if (tokens > rate.at_once) tokens = rate.at_once;
    at = now;
  }
  bool some(const tw_relay_rate& rate, uint64_t now) {
    if (tokens < 1) fill(rate, now);
    return tokens >= 1;
  }
  bool take(const tw_relay_rate& rate, uint64_t now) {
    if (!some(rate, now)) return false;
    tokens -= 1;
    return true;
  }
  bool full(const tw_relay_rate& rate, uint64_t now) const {
    return tokens + (double)(now - at) * 1e-9 * rate.a_second >= rate.at_once;
  }
};

enum Kind : uint8_t { kData = 0, kHeaders = 1, kReset = 3, kWindow = 8, kContinuation = 9 };
constexpr uint8_t kEndStream = 1, kEndHeaders = 4, kPadded = 8, kWithPriority = 0x20;  // flags
constexpr uint8_t kPriority = 5;  // bytes before a list with a priority
constexpr uint32_t kPreface = 24, kHeader = 9;  // bytes before the first frame, and of a frame before its payload

// SETTINGS, and GOAWAY with ENHANCE_YOUR_CALM.
constexpr char kRefusal[] =
    "\0\0\0\4\0\0\0\0\0" "\0\0\x2f\7\0\0\0\0\0" "\0\0\0\0" "\0\0\0\x0b" "this process opens too many connections";
static_assert(sizeof kRefusal - 1 == 9 + 9 + 0x2f, "the length that the frame says");

// GOAWAY with ENHANCE_YOUR_CALM, to one that is open.
constexpr char kTooMuch[] =
    "\0\0\x32\7\0\0\0\0\0" "\0\0\0\0" "\0\0\0\x0b" "a list of headers is too long or not legal";
static_assert(sizeof kTooMuch - 1 == 9 + 0x32, "the length that the frame says");

// GOAWAY without an error, after which no stream is refused.
constexpr char kParting[] = "\0\0\x08\7\0\0\0\0\0" "\x7f\xff\xff\xff" "\0\0\0\0";
static_assert(sizeof kParting - 1 == 9 + 8, "the length that the frame says");

inline uint32_t stream_of(const uint8_t* header) {
  return ((uint32_t)header[5] << 24 | (uint32_t)header[6] << 16 | (uint32_t)header[7] << 8 | header[8]) & 0x7fffffff;
}

struct Rates {
  tw_relay_rate control, resets, frames, lists;
  uint32_t list_bytes;  // that one list may have
  uint64_t open_bytes;  // of long lists of streams that are open
};
struct Spent {
  Bucket control, resets, frames;
  Bucket lists;   // in bytes; may be in debt by a list
  uint64_t open;  // bytes of long lists of streams that are open

  bool take(const Rates& rates, uint8_t kind, uint64_t now) {
    switch (kind) {
      case kData: case kHeaders: case kWindow: case kContinuation: return frames.take(rates.frames, now);
      case kReset: return resets.take(rates.resets, now);
      default: return control.take(rates.control, now);
    }
  }
};

// Place in what the server sends to one connection.
struct Boundaries {
  uint32_t payload = 0;  // bytes of the frame that are still to come
  uint32_t have = 0;     // bytes of a header that have been seen
  uint8_t header[kHeader];
  bool begun = false;    // a frame has come: SETTINGS is the first
  bool headers = false;  // within a block of headers, which is one piece

  // Another frame may stand here.
  bool between() const { return begun && !payload && !have && !headers; }

  void pass(const uint8_t* data, size_t count, OpenLists& open, Spent& spent) {
    for (size_t at = 0; at < count;) {
      const size_t left = count - at;
      if (payload) {
        const uint32_t part = left < payload ? (uint32_t)left : payload;
        payload -= part;
        at += part;
        continue;
      }
      const uint32_t part = left < kHeader - have ? (uint32_t)left : kHeader - have;
      memcpy(header + have, data + at, part);
      have += part;
      at += part;
      if (have < kHeader) return;
      have = 0;
      begun = true;
      payload = (uint32_t)header[0] << 16 | (uint32_t)header[1] << 8 | header[2];
      const uint8_t kind = header[3];
      if (kind == kHeaders || kind == kContinuation) headers = !(header[4] & kEndHeaders);
      if (kind == kReset || (kind <= kHeaders && header[4] & kEndStream)) spent.open -= open.remove(stream_of(header));
    }
  }
};

// Place in what one connection sends.
struct Parser {
  uint32_t preface = kPreface;
  uint32_t payload = 0;  // bytes of the frame that are still to come
  uint32_t have = 0;     // bytes of a header that have been seen
  uint8_t header[kHeader];
  uint8_t priority = 0;   // bytes before the list that are still to come
  bool in_list = false;   // the payload is part of a list of headers
  bool unended = false;   // a list has begun that another frame is to end
  bool wrong = false;     // a list is too long or malformed: nothing more is admitted
  HeaderLists lists{};
  OpenLists open{};

  // Bytes of `data` that may be passed on. Fewer than `count`: the next frame is one too many for now, or `wrong`.
  size_t admit(const uint8_t* data, size_t count, Spent& spent, const Rates& rates, uint64_t now) {
    size_t at = 0;
    while (at < count && !wrong) {
      const size_t left = count - at;
      if (preface || payload) {
        uint32_t& skipped = preface ? preface : payload;
        const uint32_t part = left < skipped ? (uint32_t)left : skipped;
        if (!preface && in_list && !read(data + at, part, spent, rates)) return at;
        skipped -= part;
        at += part;
        if (!payload) end(spent);
        continue;
      }
      const uint32_t part = left < kHeader - have ? (uint32_t)left : kHeader - have;
      memcpy(header + have, data + at, part);
      if (have + part == kHeader) {
        const uint8_t kind = header[3];
        if (kind == kHeaders && (!spent.lists.some(rates.lists, now) || spent.open > rates.open_bytes)) return at;
        if (!spent.take(rates, kind, now)) return at;
        payload = (uint32_t)header[0] << 16 | (uint32_t)header[1] << 8 | header[2];
        have = 0;
        if (!begin(kind, header[4])) return at;
        if (kind == kReset) spent.open -= open.remove(stream_of(header));
        if (!payload) end(spent);
      } else {
        have += part;
      }
      at += part;
    }
    return at;
  }

 private:
  // gRPC takes padding for headers, so a list would be another one for it than for us: it is refused.
  bool begin(uint8_t kind, uint8_t flags) {
    in_list = kind == kHeaders || kind == kContinuation;
    wrong = (kind == kContinuation) != unended || (kind == kHeaders && flags & kPadded);
    if (!in_list) return !wrong;
    unended = !(flags & kEndHeaders);
    priority = kind == kHeaders && flags & kWithPriority ? kPriority : 0;
    if (kind == kHeaders) lists.list = 0;
    return !wrong;
  }

  bool read(const uint8_t* data, uint32_t count, Spent& spent, const Rates& rates) {
    const uint32_t before = count < priority ? count : priority;
    priority = (uint8_t)(priority - before);
    const uint32_t had = lists.list;
    wrong = !lists.read(data + before, count - before, rates.list_bytes);
    spent.lists.tokens -= lists.list - had;
    return !wrong;
  }

  void end(Spent& spent) {
    if (in_list && !unended) {
      wrong = priority || !lists.between();
      if (!wrong && lists.list > kShortList) {
        const uint32_t more = lists.list - kShortList;
        wrong = !stream_of(header) || !open.add(stream_of(header), more);
        if (!wrong) spent.open += more;
      }
    }
    in_list = false;
  }
};

}  // namespace tw
