// Processes, connections and bytes that a relay holds.
#pragma once
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/un.h>

#include "common/lock.hpp"
#include "relay/frames.hpp"

namespace tw {

constexpr size_t kChunk = 64 * 1024;
constexpr uint32_t kPlaces = 256;
constexpr size_t kName = 64;  // bytes of the beginning of names

// A process, or a host, that has connected.
struct Peer {
  pid_t pid;
  uid_t uid;
  uint8_t host[16];  // of IPv6 the first half, which one owner may have whole
  uint32_t open;
  Bucket connects;
  Spent spent;
  Peer* next;
};

struct Connection;
struct End {
  Connection* owner;
  int fd;
  uint32_t events;  // 0: epoll does not know it
};
// Bytes that could not be passed on yet: [begin, end) of `held`, of which `cleared` may be.
struct Way {
  uint8_t* held;
  uint32_t begin, end, cleared;
  bool ended, shut;
  bool empty() const { return begin == end; }
};
enum Side { kClient = 0, kServer = 1 };
struct Connection {
  End ends[2];
  Way ways[2];  // by the side that sends
  Parser parser;
  Boundaries down;
  bool parting;  // the client is to be told that this server leaves
  Peer* peer;
  tw_relay_peer who;
  uint64_t paced;   // until when nothing is taken from the client; 0: it is
  uint64_t ending;  // until when the client may read what is left; 0: the server has not closed
  bool dead;
  uint64_t id;  // of its name
  Connection *before, *after, *next_dead, *next_named;
};

// A connection that was handed over and is not served yet.
struct Adopted {
  int fd;
  tw_relay_peer who;
  Adopted* next;
};

}  // namespace tw

struct tw_relay {
  int epoll, wake, listener;
  int spare;  // a socket for the next connection to the server: made before that is accepted; -1: none
  uint64_t id;  // of the spare socket
  char name[tw::kName + 1];
  tw::Rates rates;
  tw_relay_rate connects;
  sockaddr_un target;
  pid_t own;
  tw::Peer* peers[tw::kPlaces];
  tw::Connection *first, *dead;
  uint32_t waiting;       // connections with a time in `paced` or `ending`
  uint64_t deaf;          // until when nothing is accepted, for lack of descriptors; 0: it is
  uint64_t accepted, refused, paced, open, ended;
  bool leaving, to_leave, stopping;
  tw::Lock lock;  // of `named` and `adopted`
  tw::Adopted* adopted;  // the last one first
  tw::Connection* named[tw::kPlaces];  // by id
  uint8_t chunk[tw::kChunk];
};
