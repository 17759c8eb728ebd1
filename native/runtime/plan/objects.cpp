#include "plan/objects.hpp"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/error.hpp"
#include "common/lock.hpp"
#include "common/sha256.hpp"

namespace tw {
namespace {
Lock objects_lock;
Object* objects = nullptr;

Object* found(const uint8_t sha256[32]) {
  for (Object* object = objects; object; object = object->next)
    if (memcmp(object->sha256, sha256, 32) == 0) return object;
  return nullptr;
}

tw_status wrong_digest() {
  return fail(TW_OBJECT_DIGEST, "object_digest", "get the code object again from the server or bundle",
      "these bytes are not the code object that the hash names");
}

tw_status no_memory(size_t bytes) {
  return concerning(
      fail(TW_NO_MEMORY, "host_memory", "free memory", "no memory for a code object of %zu bytes", bytes), -1,
      (int64_t)bytes);
}
}  // namespace

Object* find_object(const uint8_t sha256[32]) {
  const Guard guard(objects_lock);
  return found(sha256);
}

tw_status keep_object(const uint8_t sha256[32], const void* data, size_t bytes) {
  const Guard guard(objects_lock);
  if (found(sha256)) return TW_OK;
  Object* const object = (Object*)calloc(1, sizeof(Object));
  unsigned char* const content = (unsigned char*)malloc(bytes + 1);
  if (!object || !content) {
    free(object), free(content);
    return no_memory(bytes);
  }
  memcpy(object->sha256, sha256, 32);
  memcpy(content, data, bytes);
  content[bytes] = 0;
  object->bytes = bytes, object->content = content;
  object->next = objects, objects = object;
  return TW_OK;
}

}  // namespace tw

int32_t tw_object_known(const uint8_t sha256[32]) { return sha256 && tw::find_object(sha256) ? 1 : 0; }

tw_status tw_object_put(const uint8_t sha256[32], const void* data, size_t bytes) {
  if (!sha256 || !data || !bytes)
    return tw::fail(TW_INVALID_ARGUMENT, "argument", "give a hash and bytes", "a code object without hash or bytes");
  if (tw::find_object(sha256)) return TW_OK;
  if (!tw::has_digest(data, bytes, sha256)) return tw::wrong_digest();
  return tw::keep_object(sha256, data, bytes);
}

tw_status tw_object_put_fd(const uint8_t sha256[32], int fd, size_t bytes) {
  if (!sha256 || fd < 0 || !bytes)
    return tw::fail(TW_INVALID_ARGUMENT, "argument", "give a hash, a file and its size", "a code object without a file");
  if (tw::find_object(sha256)) return TW_OK;
  // Read, not mapped: the file may shrink or change while it is looked at.
  char* const data = (char*)malloc(bytes);
  if (!data) return tw::no_memory(bytes);
  size_t done = 0;
  while (done < bytes) {
    const ssize_t got = pread(fd, data + done, bytes - done, (off_t)done);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    done += (size_t)got;
  }
  const tw_status status = done == bytes ? tw_object_put(sha256, data, bytes) : tw::wrong_digest();
  free(data);
  return status;
}
