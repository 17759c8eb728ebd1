// Sizes of the lists of headers that a connection sends, as HTTP/2 counts them: decoded.
//
// One byte may stand for a header that the receiver remembers, and a receiver may keep each of them apart: 16 KiB on the
// wire become two megabytes in gRPC. Sizes need no contents, only the lengths of what a receiver remembers.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace tw {

// RFC 7541: entries of its own table with the longest name and value, bytes that each header costs besides, entries that
// a table of 4096 bytes (gRPC's, and the least that a client may count on) can hold.
constexpr uint32_t kStatic = 61, kStaticName = 27, kStaticValue = 13, kOverhead = 32, kRemembered = 128;

// Decoder of lengths. An entry is found by how recently it was remembered, so it does not matter here when a receiver
// forgets it: to name it afterwards is an error that ends the connection.
struct HeaderLists {
  enum Step : uint8_t { kField, kFieldMore, kLength, kLengthMore, kString };
  Step step;
  bool resizing, literal, remember, name, huffman;
  uint8_t shift;
  uint8_t newest;
  uint32_t number;  // index or length
  uint32_t left;    // bytes of a string that are still to come
  uint32_t name_bytes, value_bytes;
  uint32_t list;  // bytes of the list so far
  uint16_t names[kRemembered], values[kRemembered];

  // No header is half read.
  bool between() const { return step == kField; }

  // Adds what stands in `data` to the list. False: it is malformed, or has more than `most` bytes.
  bool read(const uint8_t* data, size_t count, uint32_t most) {
    for (size_t at = 0; at < count;) {
      if (step == kString) {
        const uint32_t part = count - at < left ? (uint32_t)(count - at) : left;
        left -= part;
        at += part;
        if (!left) end_string();
      } else if (!take(data[at++], most)) {
        return false;
      }
      if (list > most) return false;
    }
    return true;
  }

 private:
  bool take(uint8_t byte, uint32_t most) {
    switch (step) {
      case kField: {
        const int bits = byte & 0x80 ? 7 : byte & 0x40 ? 6 : byte & 0x20 ? 5 : 4;
        literal = bits == 6 || bits == 4;
        remember = bits == 6;
        return begin(byte, bits, kFieldMore) || end_field(bits == 5);
      }
      case kLength:
        huffman = byte & 0x80;
        return begin(byte, 7, kLengthMore) || end_length(most);
      default:
        number += (uint32_t)(byte & 0x7f) << shift;
        shift += 7;
        if (byte & 0x80) return shift <= 21;
        return step == kFieldMore ? end_field(resizing) : end_length(most);
    }
  }

  // True if the number goes on in the next byte.
  bool begin(uint8_t byte, int bits, Step more) {
    const uint32_t mask = (1u << bits) - 1;
    number = byte & mask;
    shift = 0;
    resizing = bits == 5;
    if (number < mask) return false;
    step = more;
    return true;
  }

  bool end_field(bool resize) {
    step = kField;
    if (resize) return true;
    if (number > kStatic + kRemembered || (!number && !literal)) return false;
    const uint32_t place = number <= kStatic ? 0 : (newest + kRemembered - (number - kStatic - 1)) % kRemembered;
    name_bytes = !number ? 0 : number <= kStatic ? kStaticName : names[place];
    value_bytes = number <= kStatic ? kStaticValue : values[place];
    if (!literal) {
      list += name_bytes + value_bytes + kOverhead;
      return true;
    }
    name = !number;
    step = kLength;
    return true;
  }

  bool end_length(uint32_t most) {
    if (number > most) return false;
    left = number;
    // The shortest code has 5 bits.
    (name ? name_bytes : value_bytes) = huffman ? number + number * 3 / 5 + 1 : number;
    step = kString;
    if (!left) end_string();
    return true;
  }

  void end_string() {
    step = kLength;
    if (name) {
      name = false;
      return;
    }
    step = kField;
    list += name_bytes + value_bytes + kOverhead;
    if (!remember) return;
    newest = (uint8_t)((newest + 1) % kRemembered);
    names[newest] = short_of(name_bytes);
    values[newest] = short_of(value_bytes);
  }

  // No receiver remembers a longer one.
  static uint16_t short_of(uint32_t bytes) { return bytes < 0xffff ? (uint16_t)bytes : 0xffff; }
};

}  // namespace tw
