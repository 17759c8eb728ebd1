// One thread that passes bytes between clients and a server on a Unix socket.
#include "relay/relay.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "common/error.hpp"
#include "relay/arrivals.hpp"

namespace tw {
namespace {

constexpr int kTurn = 4;       // chunks that one connection passes before others have their turn
constexpr int kEvents = 64;    // of one look
constexpr int kAccepts = 1024; // connections that are accepted in a row
constexpr int kUrgent = -10;   // nice value of the thread, where the system lets it have one
constexpr int kPauseMs = 10;   // a connection that sends too much waits for at least that long
constexpr uint64_t kPause = 1000000ull * kPauseMs;
constexpr uint64_t kDrain = 5000000000ull;  // for a client to read what a server said last

void count(uint64_t& counter, uint64_t by = 1) { __atomic_fetch_add(&counter, by, __ATOMIC_RELAXED); }

void set_time(tw_relay& relay, uint64_t& field, uint64_t value) {
  relay.waiting += (value != 0) - (field != 0);
  field = value;
}

constexpr uint32_t kIn = EPOLLIN, kOut = EPOLLOUT;
constexpr uint32_t kKnown = 1u << 31;  // keeps an end in epoll, which then tells of its close only

void watch(tw_relay& relay, End& end, uint32_t events) {
  if (events == end.events) return;
  epoll_event event;
  event.events = events & (kIn | kOut);
  event.data.ptr = &end;
  epoll_ctl(relay.epoll, !events ? EPOLL_CTL_DEL : end.events ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, end.fd, &event);
  end.events = events;
}

void finish(tw_relay& relay, Connection& c) {
  if (c.dead) return;
  c.dead = true;
  set_time(relay, c.paced, 0);
  set_time(relay, c.ending, 0);
  for (int side = 0; side < 2; ++side) {
    watch(relay, c.ends[side], 0);  // a copy of the descriptor, made elsewhere, would keep it in epoll
    close(c.ends[side].fd);
    free(c.ways[side].held);
  }
  c.peer->open -= 1;
  c.peer->spent.open -= c.parser.open.bytes;
  free(c.parser.open.entries);
  {
    Guard guard(relay.lock);
    Connection** place = &relay.named[c.id % kPlaces];
    while (*place != &c) place = &(*place)->next_named;
    *place = c.next_named;
  }
  (c.before ? c.before->after : relay.first) = c.after;
  if (c.after) c.after->before = c.before;
  c.next_dead = relay.dead;
  relay.dead = &c;
  count(relay.open, (uint64_t)-1);
}

bool hold(Way& way, const uint8_t* data, size_t bytes, size_t cleared) {
  way.held = (uint8_t*)malloc(bytes);
  if (!way.held) return false;
  memcpy(way.held, data, bytes);
  way.begin = 0;
  way.end = (uint32_t)bytes;
  way.cleared = (uint32_t)cleared;
  return true;
}

size_t admitted(tw_relay& relay, Connection& c, Side side, const uint8_t* data, size_t bytes) {
  if (side == kServer || c.peer->pid == relay.own) return bytes;
  const uint64_t time = now();
  const size_t some = c.parser.admit(data, bytes, c.peer->spent, relay.rates, time);
  if (some < bytes && !c.parser.wrong) {
    set_time(relay, c.paced, time + kPause);
    count(relay.paced);
  }
  return some;
}

// Tells the client that the server leaves, once that may stand in what the server sends. False: the connection has ended.
bool part(Connection& c) {
  Way& way = c.ways[kServer];
  if (!c.parting || !way.empty() || way.ended || !c.down.between()) return true;
  c.parting = false;
  constexpr size_t bytes = sizeof kParting - 1;
  ssize_t sent = send(c.ends[kClient].fd, kParting, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent < 0) {
    if (errno != EAGAIN && errno != EINTR) return false;
    sent = 0;
  }
  const size_t left = bytes - (size_t)sent;
  return !left || hold(way, (const uint8_t*)kParting + sent, left, left);
}

// Tells the client why its connection ends, where that may stand in what the server sends. False: it ends.
bool end_for_lists(tw_relay& relay, const Connection& c) {
  count(relay.ended);
  if (c.ways[kServer].empty() && c.down.between())
    send(c.ends[kClient].fd, kTooMuch, sizeof kTooMuch - 1, MSG_NOSIGNAL | MSG_DONTWAIT);
  return false;
}

// Passes on what `side` has sent. False: the connection has ended.
bool pass(tw_relay& relay, Connection& c, Side side) {
  Way& way = c.ways[side];
  const int from = c.ends[side].fd, to = c.ends[1 - side].fd;
  for (int turn = 0; turn < kTurn; ++turn) {
    if (!way.empty()) {
      if (!way.cleared) {
        if (c.paced) return true;
        way.cleared = (uint32_t)admitted(relay, c, side, way.held + way.begin, way.end - way.begin);
        if (side == kClient && c.parser.wrong) return end_for_lists(relay, c);
        if (!way.cleared) return true;
      }
      const ssize_t sent = send(to, way.held + way.begin, way.cleared, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent < 0) return errno == EAGAIN || errno == EINTR;
      way.begin += (uint32_t)sent;
      way.cleared -= (uint32_t)sent;
      if (way.empty()) {
        free(way.held);
        way = {nullptr, 0, 0, 0, way.ended, way.shut};
        if (side == kServer && !part(c)) return false;
      }
      continue;
    }
    if (way.ended) {
      if (side == kServer) return false;
      if (!way.shut) way.shut = !shutdown(to, SHUT_WR);
      return way.shut;
    }
    const ssize_t got = recv(from, relay.chunk, kChunk, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return true;
    if (got < 0 && side == kClient) return false;
    if (got <= 0) {
      way.ended = true;
      continue;
    }
    const size_t some = admitted(relay, c, side, relay.chunk, (size_t)got);
    if (side == kClient && c.parser.wrong) return end_for_lists(relay, c);
    if (side == kServer) c.down.pass(relay.chunk, some, c.parser.open, c.peer->spent);
    ssize_t sent = some ? send(to, relay.chunk, some, MSG_NOSIGNAL | MSG_DONTWAIT) : 0;
    if (sent < 0) {
      if (errno != EAGAIN && errno != EINTR) return false;
      sent = 0;
    }
    if (sent < got && !hold(way, relay.chunk + sent, (size_t)(got - sent), some - (size_t)sent)) return false;
    if (side == kServer && !part(c)) return false;
    if ((size_t)got < kChunk) return true;
  }
  return true;
}

void look_for_more(tw_relay& relay, Connection& c) {
  const Way &up = c.ways[kClient], &down = c.ways[kServer];
  const bool reads = up.empty() && !up.ended && !c.ending;
  watch(relay, c.ends[kClient], kKnown | (reads ? kIn : 0) | (!down.empty() || c.ending ? kOut : 0));
  if (c.ending) {
    watch(relay, c.ends[kServer], 0);
    return;
  }
  const bool writes = !up.empty() && up.cleared;
  watch(relay, c.ends[kServer], kKnown | (down.empty() && !down.ended ? kIn : 0) | (writes ? kOut : 0));
}

void serve(tw_relay& relay, End& end, uint32_t events) {
  Connection& c = *end.owner;
  if (c.dead) return;
  const Side side = &end == &c.ends[kClient] ? kClient : kServer;
  bool goes = true;
  if (events & (EPOLLHUP | EPOLLERR)) {
    if (side == kClient) return finish(relay, c);  // nobody is there any more
    set_time(relay, c.ending, now() + kDrain);
  }
  if (side == kServer && events & EPOLLOUT) goes = pass(relay, c, kClient);
  if (side == kClient && events & EPOLLIN && !c.ending) goes = pass(relay, c, kClient);
  if (goes && (c.ending || (side == kServer ? events & EPOLLIN : events & EPOLLOUT))) goes = pass(relay, c, kServer);
  if (goes) return look_for_more(relay, c);
  finish(relay, c);
}

void refuse(tw_relay& relay, int fd) {
  send(fd, kRefusal, sizeof kRefusal - 1, MSG_NOSIGNAL | MSG_DONTWAIT);
  close(fd);
  count(relay.refused);
}

bool connect_to_server(tw_relay& relay, int client, const tw_relay_peer& who, Peer* peer) {
  const int fd = relay.spare;
  Connection* c = nullptr;
  if (!(c = (Connection*)calloc(1, sizeof(Connection)))) return false;
  if (connect(fd, (const sockaddr*)&relay.target, sizeof relay.target)) {
    free(c);
    return false;
  }
  relay.spare = -1;
  c->ends[kClient] = {c, client, 0};
  c->ends[kServer] = {c, fd, 0};
  c->parser.preface = kPreface;
  c->peer = peer;
  c->who = who;
  peer->open += 1;
  c->after = relay.first;
  if (c->after) c->after->before = c;
  relay.first = c;
  c->id = relay.id;
  {
    Guard guard(relay.lock);
    c->next_named = relay.named[c->id % kPlaces];
    relay.named[c->id % kPlaces] = c;
  }
  count(relay.accepted);
  count(relay.open);
  look_for_more(relay, *c);
  return true;
}

// Begins to relay a connection, whose descriptor is the relay's now.
void admit(tw_relay& relay, int fd, const tw_relay_peer& who) {
  const uint64_t time = now();
  Peer* peer = peer_of(relay, who, time);
  if (peer && who.pid != relay.own && !peer->connects.take(relay.connects, time)) refuse(relay, fd);
  else if (!peer || !connect_to_server(relay, fd, who, peer)) close(fd);
}

void listen_again(tw_relay& relay, bool on) {
  if (relay.leaving) return;
  epoll_event event;
  event.events = on ? (uint32_t)EPOLLIN : 0;
  event.data.ptr = &relay.listener;
  epoll_ctl(relay.epoll, EPOLL_CTL_MOD, relay.listener, &event);
  set_time(relay, relay.deaf, on ? 0 : now() + kPause);
}

void accept_some(tw_relay& relay) {
  for (int turn = 0; turn < kAccepts && !relay.leaving; ++turn) {
    if (!make_spare(relay)) return listen_again(relay, false);
    sockaddr_storage from{};
    socklen_t bytes = sizeof from;
    const int fd = accept4(relay.listener, (sockaddr*)&from, &bytes, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      if (errno != EAGAIN) listen_again(relay, false);
      return;
    }
    tw_relay_peer who{};
    if (identify(fd, from, who)) admit(relay, fd, who);
    else close(fd);
  }
}

void adopt_some(tw_relay& relay) {
  for (Adopted *one = take_adopted(relay), *next; one; one = next) {
    next = one->next;
    if (make_spare(relay)) admit(relay, one->fd, one->who);
    else close(one->fd);
    free(one);
  }
}

void attend_to_times(tw_relay& relay) {
  const uint64_t time = now();
  if (relay.deaf && time >= relay.deaf) listen_again(relay, true);
  for (Connection *c = relay.first, *after; c; c = after) {
    after = c->after;
    if (c->ending && time >= c->ending) {
      finish(relay, *c);
    } else if (c->paced && time >= c->paced) {
      set_time(relay, c->paced, 0);
      if (pass(relay, *c, kClient)) look_for_more(relay, *c);
      else finish(relay, *c);
    }
  }
}

// True: the relay is to stop.
bool attend_to_wishes(tw_relay& relay) {
  uint64_t times;
  if (read(relay.wake, &times, sizeof times) < 0 && errno != EAGAIN) return true;
  if (__atomic_load_n(&relay.stopping, __ATOMIC_ACQUIRE)) return true;
  adopt_some(relay);
  if (relay.leaving || !__atomic_load_n(&relay.to_leave, __ATOMIC_ACQUIRE)) return false;
  set_time(relay, relay.deaf, 0);
  relay.leaving = true;
  epoll_event none{};
  if (relay.listener >= 0) epoll_ctl(relay.epoll, EPOLL_CTL_DEL, relay.listener, &none);
  for (Connection *c = relay.first, *after; c; c = after) {
    after = c->after;
    c->parting = true;
    if (part(*c)) look_for_more(relay, *c);
    else finish(relay, *c);
  }
  return false;
}

void wake(tw_relay& relay) {
  const uint64_t one = 1;
  while (write(relay.wake, &one, sizeof one) < 0 && errno == EINTR) {
  }
}

void bury(tw_relay& relay) {
  while (Connection* c = relay.dead) {
    relay.dead = c->next_dead;
    free(c);
  }
}

bool positive(const tw_relay_rate& rate) { return rate.a_second > 0 && rate.at_once >= 1; }

}  // namespace
}  // namespace tw

using namespace tw;

extern "C" {

tw_status tw_relay_open(const tw_relay_config* config, tw_relay** result) {
  if (!config || !result || config->struct_bytes != sizeof *config || !config->target || !config->name)
    return fail(TW_INVALID_ARGUMENT, "argument", "pass a tw_relay_config of this header", "no configuration");
  sockaddr_un target{};
  const size_t bytes = strlen(config->target);
  if (bytes >= sizeof target.sun_path)
    return fail(TW_INVALID_ARGUMENT, "path", "use a shorter path", "a path of %zu bytes", bytes);
  if (!*config->name || strlen(config->name) > kName)
    return fail(TW_INVALID_ARGUMENT, "name", "give 1 to 64 bytes", "a name of %zu bytes", strlen(config->name));
  if (!positive(config->connects) || !positive(config->control) || !positive(config->resets) ||
      !positive(config->frames) || !positive(config->lists) || !config->list_bytes || !config->open_bytes)
    return fail(TW_INVALID_ARGUMENT, "rate", "give positive rates", "a rate of nothing");
  auto* relay = (tw_relay*)calloc(1, sizeof(tw_relay));
  if (!relay) return fail(TW_NO_MEMORY, "memory", "free memory", "no memory for a relay");
  target.sun_family = AF_UNIX;
  memcpy(target.sun_path, config->target, bytes);
  relay->target = target;
  relay->lock = Lock{};
  memcpy(relay->name, config->name, strlen(config->name));
  relay->spare = -1;
  relay->listener = config->listener;
  relay->rates = {config->control, config->resets, config->frames, config->lists, config->list_bytes,
                  config->open_bytes};
  relay->connects = config->connects;
  relay->own = getpid();
  relay->epoll = epoll_create1(EPOLL_CLOEXEC);
  relay->wake = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  epoll_event event;
  event.events = EPOLLIN;
  event.data.ptr = &relay->wake;
  bool ready = relay->epoll >= 0 && relay->wake >= 0 && make_spare(*relay) &&
               !epoll_ctl(relay->epoll, EPOLL_CTL_ADD, relay->wake, &event);
  event.data.ptr = &relay->listener;
  ready = ready && (relay->listener < 0 || !epoll_ctl(relay->epoll, EPOLL_CTL_ADD, relay->listener, &event));
  if (!ready) {
    const int error = errno;
    tw_relay_close(relay);
    return fail(TW_INVALID_ARGUMENT, "system", "raise the limit of descriptors", "the system refuses: errno %d", error);
  }
  *result = relay;
  return TW_OK;
}

void tw_relay_run(tw_relay* relay) {
  setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), kUrgent);  // of this thread alone
  epoll_event events[kEvents];
  for (;;) {
    const int found = epoll_wait(relay->epoll, events, kEvents, relay->waiting ? kPauseMs : -1);
    for (int index = 0; index < found; ++index) {
      void* what = events[index].data.ptr;
      if (what == &relay->wake) {
        if (attend_to_wishes(*relay)) return;
        continue;
      }
      if (what == &relay->listener) accept_some(*relay);
      else serve(*relay, *(End*)what, events[index].events);
    }
    if (relay->waiting) attend_to_times(*relay);
    bury(*relay);
  }
}

void tw_relay_stop(tw_relay* relay) {
  __atomic_store_n(&relay->stopping, true, __ATOMIC_RELEASE);
  wake(*relay);
}

void tw_relay_leave(tw_relay* relay) {
  __atomic_store_n(&relay->to_leave, true, __ATOMIC_RELEASE);
  wake(*relay);
}

tw_status tw_relay_adopt(tw_relay* relay, int32_t fd, const tw_relay_peer* peer) {
  if (!adopt(*relay, fd, *peer)) return fail(TW_NO_MEMORY, "memory", "free memory", "no memory for a connection");
  wake(*relay);
  return TW_OK;
}

tw_status tw_relay_find(tw_relay* relay, uint64_t id, tw_relay_peer* peer) {
  Guard guard(relay->lock);
  for (const Connection* c = relay->named[id % kPlaces]; c; c = c->next_named)
    if (c->id == id) {
      *peer = c->who;
      return TW_OK;
    }
  return fail(TW_NOT_FOUND, "connection", "ask for one that is open", "no connection %llx", (unsigned long long)id);
}

void tw_relay_count(const tw_relay* relay, tw_relay_counts* counts) {
  counts->accepted = __atomic_load_n(&relay->accepted, __ATOMIC_RELAXED);
  counts->refused = __atomic_load_n(&relay->refused, __ATOMIC_RELAXED);
  counts->paced = __atomic_load_n(&relay->paced, __ATOMIC_RELAXED);
  counts->open = __atomic_load_n(&relay->open, __ATOMIC_RELAXED);
  counts->ended = __atomic_load_n(&relay->ended, __ATOMIC_RELAXED);
}

void tw_relay_close(tw_relay* relay) {
  if (!relay) return;
  while (relay->first) finish(*relay, *relay->first);
  bury(*relay);
  for (Adopted *one = take_adopted(*relay), *next; one; one = next) {
    next = one->next;
    close(one->fd);
    free(one);
  }
  for (Peer*& place : relay->peers)
    while (Peer* peer = place) {
      place = peer->next;
      free(peer);
    }
  if (relay->spare >= 0) close(relay->spare);
  if (relay->epoll >= 0) close(relay->epoll);
  if (relay->wake >= 0) close(relay->wake);
  free(relay);
}

}  // extern "C"
