/* Relay of connections of HTTP/2: accepts them, and passes their bytes to a server that listens elsewhere, at the pace
 * at which that server can work.
 *
 * A frame of 17 bytes may cost a server 40 microseconds, and the kernel holds thousands of them for each connection.
 * The relay counts frames by the process that sends them (over TCP, by the host: its address, of IPv6 the first half)
 * and leaves the rest in the kernel, so what one process sends costs the server no more than its rates say. Connections
 * are counted likewise, and so are the bytes that lists of headers have when they are decoded, where one byte may stand
 * for thousands.
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
  int32_t listener;        /* a Unix or TCP stream socket that listens, which stays the caller's; -1: none, connections
                            * come by tw_relay_adopt alone */
  const char* target;      /* path of the Unix socket of the server */
  const char* name;        /* beginning of the names of its connections to the server, in the abstract namespace: the
                            * server sees NAME-ID, ID a hexadecimal number that does not come again. At most 64 bytes,
                            * and random: who could guess it could take a name before the relay does. */
  tw_relay_rate connects;  /* connections of one process; more are closed at once */
  tw_relay_rate control;   /* frames of one process that carry no call: PING, SETTINGS and the like */
  tw_relay_rate resets;    /* RST_STREAM */
  tw_relay_rate frames;    /* all others */
  tw_relay_rate lists;     /* bytes of lists of headers, decoded, with 32 for each header (RFC 9113, 10.5.1) */
  uint32_t list_bytes;     /* that one list may have; a connection that sends a longer one is ended */
  uint64_t open_bytes;     /* of lists, beyond 1 KiB each, of streams of one process that the server has not ended: no
                            * more streams are begun until some end */
} tw_relay_config;

typedef struct tw_relay_counts {
  uint64_t accepted, refused;
  uint64_t paced; /* times that a connection had to wait for its process's rate */
  uint64_t open;
  uint64_t ended; /* connections that sent a list of headers that is too long or malformed */
} tw_relay_counts;

/* The other end of a connection, as the kernel named it when it connected: a process, or the address of a host. */
typedef struct tw_relay_peer {
  int32_t pid; /* 0: of a namespace that this process does not see; -1: over TCP */
  uint32_t uid;
  uint8_t host[16]; /* over TCP: the address as one of IPv6 (RFC 4291, 2.5.5.2) */
  uint32_t port;    /* over TCP */
  uint32_t tag;     /* of tw_relay_adopt */
} tw_relay_peer;

typedef struct tw_relay tw_relay;
TW_API tw_status tw_relay_open(const tw_relay_config* config, tw_relay** relay);
/* Relays until tw_relay_stop. */
TW_API void tw_relay_run(tw_relay* relay);
/* From any thread. */
TW_API void tw_relay_stop(tw_relay* relay);
/* From any thread: accept no more connections, and pass on what those that are open send. Their clients are told, by
 * GOAWAY without an error, to make new calls over new connections; calls that they have begun go on. */
TW_API void tw_relay_leave(tw_relay* relay);
/* From any thread: relay the connection `fd`, which becomes the relay's, as one that it has accepted from `peer`. An
 * error leaves `fd` with the caller; one of the system, later, ends the connection. */
TW_API tw_status tw_relay_adopt(tw_relay* relay, int32_t fd, const tw_relay_peer* peer);
/* From any thread. TW_NOT_FOUND for a connection that is not open. */
TW_API tw_status tw_relay_find(tw_relay* relay, uint64_t id, tw_relay_peer* peer);
TW_API void tw_relay_count(const tw_relay* relay, tw_relay_counts* counts);
/* After tw_relay_run has returned, or without a run. */
TW_API void tw_relay_close(tw_relay* relay);

#ifdef __cplusplus
}
#endif
#endif
