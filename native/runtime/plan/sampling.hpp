// Counts and sampled times of launches, for whoever reads a plan's record.
#pragma once
#include "plan/plan.hpp"

namespace tw {

constexpr uint64_t kSampleEvery = 1024, kFirstSample = 15;  // launches

struct EventPair;

// One launch that may be timed. Costs a load where it is not.
class Sampled {
 public:
  Sampled(const tw_plan* plan, tw_stream stream) : record_(__atomic_load_n(&plan->record, __ATOMIC_RELAXED)) {
    if (record_ && __atomic_load_n(&record_->launches, __ATOMIC_RELAXED) % kSampleEvery == kFirstSample)
      begin(plan, stream);
  }
  ~Sampled() {
    if (timed_) end(false);
  }
  // The launch was accepted.
  void done() {
    if (!record_) return;
    const uint64_t before = __atomic_fetch_add(&record_->launches, 1, __ATOMIC_RELAXED);
    // One sample at a time, however many launches are made.
    if (timed_) end(before % kSampleEvery == kFirstSample);
  }
  Sampled(const Sampled&) = delete;
  Sampled& operator=(const Sampled&) = delete;

 private:
  void begin(const tw_plan* plan, tw_stream stream);
  void end(bool counts);

  tw_launch_record* const record_;
  bool timed_ = false;
  uint64_t begin_ns_ = 0;
  EventPair* pair_ = nullptr;  // of a GPU
  tw_stream stream_ = nullptr;
};

// Forgets samples of a GPU that are not known yet: nothing is written into the record any more.
void forget_samples(const tw_launch_record* record);

}  // namespace tw
