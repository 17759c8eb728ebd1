// SHA-256 (FIPS 180-4).
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace tw {

void sha256(const void* data, size_t bytes, uint8_t digest[32]);
bool has_digest(const void* data, size_t bytes, const uint8_t digest[32]);

}  // namespace tw
