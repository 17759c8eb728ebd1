// Memory of the host that is locked for the device, and numbers in it that streams write and wait for.
#pragma once
typedef struct Locked {
  Ptr base;
  size_t size;
  struct Locked* next;
} Locked;
static Locked* locked;
static Locked* locked_at(Ptr p, size_t n) {
  for (Locked* l = locked; l; l = l->next)
    if (p >= l->base && p + n <= l->base + l->size) return l;
  return 0;
}
R hipHostRegister(void* p, size_t n, unsigned f) {
  ENTER;
  if (!p || !n || f >= 16) return INVALID_VALUE;
  if (locked_at((Ptr)p, n)) return ALREADY_LOCKED;
  Locked* l = malloc(sizeof *l);
  *l = (Locked){(Ptr)p, n, locked}, locked = l;
  return OK;
}
R hipHostUnregister(void* p) {
  ENTER;
  for (Locked** at = &locked; *at; at = &(*at)->next)
    if ((*at)->base == (Ptr)p) {
      Locked* l = *at;
      if (finish_all()) return sticky;
      *at = l->next;
      free(l);
      return OK;
    }
  return NOT_LOCKED;
}
R hipHostGetDevicePointer(Ptr* out, void* p, unsigned f) {
  ENTER;
  if (f || !locked_at((Ptr)p, 1)) return INVALID_VALUE;
  return *out = (Ptr)p, OK;
}
#ifndef WITHOUT_VALUES
R hipStreamWriteValue64(Stream* s, Ptr p, uint64_t value, unsigned f) {
  ENTER;
  if (f || p % 8 || !(locked_at(p, 8) || in((void*)p, 8))) return INVALID_VALUE;
  return put_on(s, (Op){.kind = WRITE_VALUE, .a = p, .target = value});
}
R hipStreamWaitValue64(Stream* s, Ptr p, uint64_t value, unsigned f, uint64_t mask) {
  ENTER;
  enum { AT_LEAST = 0 };  // the one condition that is used here
  if (f != AT_LEAST || ~mask || p % 8 || !(locked_at(p, 8) || in((void*)p, 8))) return INVALID_VALUE;
  if (quirk("values_signal")) return INVALID_VALUE;
  if (quirk("values_pass")) return OK;
  if (quirk("values_block"))
    for (pump(); !sticky && __atomic_load_n((uint64_t*)p, __ATOMIC_ACQUIRE) < value; pump()) nap();
  return put_on(s, (Op){.kind = AWAIT_VALUE, .a = p, .target = value});
}
#endif
