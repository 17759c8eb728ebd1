/* Relay of connections of HTTP/2: accepts them, and passes their bytes to a server that listens elsewhere, at the pace
 * at which that server can work.
 *
 * A frame of 17 bytes may cost a server 40 microseconds, and the kernel holds thousands of them for each connection.
 * The relay counts frames by the process that sends them and leaves the rest in the kernel, so what one process sends
 * costs the server no more than its rates say. Connections are counted likewise.
 *
 * For the server alone: no part of the stable interface. */
#ifndef TILEWRIGHT_RELAY_H
#define TILEWRIGHT_RELAY_H

#include "tilewright.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A rate: so many a second, after so many at once. */
typedef struct tw_relay_rate {
  double a_second;
  double at_once;
} tw_relay_rate;

typedef struct tw_relay_config {
  uint32_t struct_bytes;   /* set by the caller */
  int32_t listener;        /* a Unix stream socket that listens; stays the caller's */
  const char* target;      /* path of the Unix socket of the server */
  tw_relay_rate connects;  /* connections of one process; more are closed at once */
  tw_relay_rate control;   /* frames of one process that carry no call: PING, SETTINGS and the like */
  tw_relay_rate resets;    /* RST_STREAM */
  tw_relay_rate frames;    /* all others */
} tw_relay_config;

typedef struct tw_relay_counts {
  uint64_t accepted, refused;
  uint64_t paced; /* times that a connection had to wait for its process's rate */
  uint64_t open;
} tw_relay_counts;

typedef struct tw_relay tw_relay;
TW_API tw_status tw_relay_open(const tw_relay_config* config, tw_relay** relay);
/* Relays until tw_relay_stop. */
TW_API void tw_relay_run(tw_relay* relay);
/* From any thread. */
TW_API void tw_relay_stop(tw_relay* relay);
TW_API void tw_relay_count(const tw_relay* relay, tw_relay_counts* counts);
/* After tw_relay_run has returned, or without a run. */
TW_API void tw_relay_close(tw_relay* relay);

#ifdef __cplusplus
}
#endif
#endif
