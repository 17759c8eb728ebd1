// Arrivals at a relay: processes and hosts, connections that others have accepted, names for those to the server.
#pragma once
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "relay/state.hpp"

namespace tw {

constexpr pid_t kHost = -1;  // in the place of a process: the peer is a host

// First half of an address of IPv6, and all of one of IPv4.
inline void host_of(const uint8_t* address, uint8_t* host) {
  static const uint8_t mapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  memset(host, 0, 16);
  memcpy(host, address, memcmp(address, mapped, sizeof mapped) ? 8 : 16);
}

inline uint64_t now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

// The process or host at the other end, which may be a new one. Null: there is no memory.
inline Peer* peer_of(tw_relay& relay, const tw_relay_peer& who, uint64_t time) {
  uint8_t host[16] = {};
  uint32_t place_of = (uint32_t)who.pid;
  if (who.pid == kHost) {
    host_of(who.host, host);
    for (uint8_t byte : host) place_of = place_of * 31 + byte;
  }
  Peer** place = &relay.peers[place_of % kPlaces];
  while (Peer* peer = *place) {
    if (peer->pid == who.pid && peer->uid == who.uid && !memcmp(peer->host, host, sizeof host)) return peer;
    if (!peer->open && peer->connects.full(relay.connects, time)) {  // as good as new
      *place = peer->next;
      free(peer);
    } else {
      place = &peer->next;
    }
  }
  auto* peer = (Peer*)calloc(1, sizeof(Peer));
  if (!peer) return nullptr;
  const Rates& rates = relay.rates;
  peer->pid = (pid_t)who.pid;
  peer->uid = (uid_t)who.uid;
  memcpy(peer->host, host, sizeof host);
  peer->connects = {relay.connects.at_once, time};
  peer->spent = {{rates.control.at_once, time}, {rates.resets.at_once, time}, {rates.frames.at_once, time},
                 {rates.lists.at_once, time}, 0};
  return *place = peer;
}

// The other end of a connection that was accepted. False: it has gone.
inline bool identify(int fd, const sockaddr_storage& from, tw_relay_peer& who) {
  if (from.ss_family == AF_INET || from.ss_family == AF_INET6) {
    who.pid = kHost;
    if (from.ss_family == AF_INET) {
      const auto& address = (const sockaddr_in&)from;
      who.host[10] = who.host[11] = 0xff;
      memcpy(who.host + 12, &address.sin_addr, 4);
      who.port = ntohs(address.sin_port);
    } else {
      const auto& address = (const sockaddr_in6&)from;
      memcpy(who.host, &address.sin6_addr, 16);
      who.port = ntohs(address.sin6_port);
    }
    const int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    return true;
  }
  ucred process{};
  socklen_t bytes = sizeof process;
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &process, &bytes)) return false;
  who.pid = (int32_t)process.pid;
  who.uid = (uint32_t)process.uid;
  return true;
}

// Makes the spare socket and gives it a name that none has had. False: the system refuses.
inline bool make_spare(tw_relay& relay) {
  if (relay.spare >= 0) return true;
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) return false;
  sockaddr_un own{};
  own.sun_family = AF_UNIX;  // the name begins with a null: it is in no folder
  const int letters = snprintf(own.sun_path + 1, sizeof own.sun_path - 1, "%s-%llx", relay.name,
                               (unsigned long long)++relay.id);
  if (bind(fd, (const sockaddr*)&own, (socklen_t)(offsetof(sockaddr_un, sun_path) + 1 + (size_t)letters))) {
    const int error = errno;
    close(fd);
    errno = error;
    return false;
  }
  relay.spare = fd;
  return true;
}

// Hands a connection over, from any thread. False: there is no memory.
inline bool adopt(tw_relay& relay, int fd, const tw_relay_peer& who) {
  auto* adopted = (Adopted*)calloc(1, sizeof(Adopted));
  if (!adopted) return false;
  adopted->fd = fd;
  adopted->who = who;
  Guard guard(relay.lock);
  adopted->next = relay.adopted;
  relay.adopted = adopted;
  return true;
}

// All that were handed over since, in the order in which they were.
inline Adopted* take_adopted(tw_relay& relay) {
  Adopted *last, *first = nullptr;
  {
    Guard guard(relay.lock);
    last = relay.adopted;
    relay.adopted = nullptr;
  }
  while (last) {
    Adopted* before = last->next;
    last->next = first;
    first = last;
    last = before;
  }
  return first;
}

}  // namespace tw
