// Locks without the C++ library.
#pragma once
#include <pthread.h>

namespace tw {

struct Lock {
  pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
};

class Guard {
 public:
  explicit Guard(Lock& lock) : mutex_(&lock.mutex) { pthread_mutex_lock(mutex_); }
  ~Guard() { pthread_mutex_unlock(mutex_); }
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;

 private:
  pthread_mutex_t* mutex_;
};

}  // namespace tw
