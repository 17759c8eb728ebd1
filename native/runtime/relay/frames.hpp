// Frames of HTTP/2 that one process sends, counted and held to rates.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>

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
  bool take(const tw_relay_rate& rate, uint64_t now) {
    if (tokens < 1) fill(rate, now);
    if (tokens < 1) return false;
    tokens -= 1;
    return true;
  }
  bool full(const tw_relay_rate& rate, uint64_t now) const {
    return tokens + (double)(now - at) * 1e-9 * rate.a_second >= rate.at_once;
  }
};

enum Kind : uint8_t { kData = 0, kHeaders = 1, kReset = 3, kWindow = 8, kContinuation = 9 };
constexpr uint8_t kEndHeaders = 4;
constexpr uint32_t kPreface = 24, kHeader = 9;  // bytes before the first frame, and of a frame before its payload

// SETTINGS, and GOAWAY with ENHANCE_YOUR_CALM.
constexpr char kRefusal[] =
    "\0\0\0\4\0\0\0\0\0" "\0\0\x2f\7\0\0\0\0\0" "\0\0\0\0" "\0\0\0\x0b" "this process opens too many connections";
static_assert(sizeof kRefusal - 1 == 9 + 9 + 0x2f, "the length that the frame says");

// GOAWAY without an error, after which no stream is refused.
constexpr char kParting[] = "\0\0\x08\7\0\0\0\0\0" "\x7f\xff\xff\xff" "\0\0\0\0";
static_assert(sizeof kParting - 1 == 9 + 8, "the length that the frame says");

struct Rates {
  tw_relay_rate control, resets, frames;
};
struct Spent {
  Bucket control, resets, frames;

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

  void pass(const uint8_t* data, size_t count) {
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
      if (header[3] == kHeaders || header[3] == kContinuation) headers = !(header[4] & kEndHeaders);
    }
  }
};

// Place in what one connection sends.
struct Parser {
  uint32_t preface = kPreface;
  uint32_t payload = 0;  // bytes of the frame that are still to come
  uint32_t have = 0;     // bytes of a header that have been seen
  uint8_t header[kHeader];

  // Bytes of `data` that may be passed on. Fewer than `count`: the next frame is one too many for now.
  size_t admit(const uint8_t* data, size_t count, Spent& spent, const Rates& rates, uint64_t now) {
    size_t at = 0;
    while (at < count) {
      const size_t left = count - at;
      uint32_t& skipped = preface ? preface : payload;
      if (skipped) {
        const uint32_t part = left < skipped ? (uint32_t)left : skipped;
        skipped -= part;
        at += part;
        continue;
      }
      const uint32_t part = left < kHeader - have ? (uint32_t)left : kHeader - have;
      memcpy(header + have, data + at, part);
      if (have + part == kHeader) {
        if (!spent.take(rates, header[3], now)) return at;
        payload = (uint32_t)header[0] << 16 | (uint32_t)header[1] << 8 | header[2];
        have = 0;
      } else {
        have += part;
      }
      at += part;
    }
    return at;
  }
};

}  // namespace tw
