// The sums of a consumer warpgroup, as registers that the kernel names itself. A product of 64 x 256 has 128 of them
// per thread; as values of C++ each product and each loop would carry them through the compiler one by one. What
// touches them is volatile, and so keeps its order.
//
// They lie in chunks of 16: four blocks of 8 columns, in the order in which a product holds them. A set belongs to one
// 64 x N piece. Register i of chunk c of set s is called tw<s>_<c>_<i>; chunk q of them all is chunk q % chunks of set
// q / chunks.
#pragma once
#include "tilewright/sm90/blocks/wgmma.hpp"

namespace tw::sm90 {

constexpr int kChunk = 16;

#define TW_SUMS_4(C) "tw%0_" C "_0, tw%0_" C "_1, tw%0_" C "_2, tw%0_" C "_3"
#define TW_SUMS_8(C) TW_SUMS_4(C) ", tw%0_" C "_4, tw%0_" C "_5, tw%0_" C "_6, tw%0_" C "_7"
#define TW_SUMS_12(C) TW_SUMS_8(C) ", tw%0_" C "_8, tw%0_" C "_9, tw%0_" C "_10, tw%0_" C "_11"
#define TW_SUMS_16(C) TW_SUMS_12(C) ", tw%0_" C "_12, tw%0_" C "_13, tw%0_" C "_14, tw%0_" C "_15"
#define TW_SET_8 TW_SUMS_4("0")
#define TW_SET_16 TW_SUMS_8("0")
#define TW_SET_24 TW_SUMS_12("0")
#define TW_SET_32 TW_SUMS_16("0")
#define TW_SET_40 TW_SET_32 ", " TW_SUMS_4("1")
#define TW_SET_48 TW_SET_32 ", " TW_SUMS_8("1")
#define TW_SET_56 TW_SET_32 ", " TW_SUMS_12("1")
#define TW_SET_64 TW_SET_32 ", " TW_SUMS_16("1")
#define TW_SET_72 TW_SET_64 ", " TW_SUMS_4("2")
#define TW_SET_80 TW_SET_64 ", " TW_SUMS_8("2")
#define TW_SET_88 TW_SET_64 ", " TW_SUMS_12("2")
#define TW_SET_96 TW_SET_64 ", " TW_SUMS_16("2")
#define TW_SET_104 TW_SET_96 ", " TW_SUMS_4("3")
#define TW_SET_112 TW_SET_96 ", " TW_SUMS_8("3")
#define TW_SET_120 TW_SET_96 ", " TW_SUMS_12("3")
#define TW_SET_128 TW_SET_96 ", " TW_SUMS_16("3")
#define TW_SET_136 TW_SET_128 ", " TW_SUMS_4("4")
#define TW_SET_144 TW_SET_128 ", " TW_SUMS_8("4")
#define TW_SET_152 TW_SET_128 ", " TW_SUMS_12("4")
#define TW_SET_160 TW_SET_128 ", " TW_SUMS_16("4")
#define TW_SET_168 TW_SET_160 ", " TW_SUMS_4("5")
#define TW_SET_176 TW_SET_160 ", " TW_SUMS_8("5")
#define TW_SET_184 TW_SET_160 ", " TW_SUMS_12("5")
#define TW_SET_192 TW_SET_160 ", " TW_SUMS_16("5")
#define TW_SET_200 TW_SET_192 ", " TW_SUMS_4("6")
#define TW_SET_208 TW_SET_192 ", " TW_SUMS_8("6")
#define TW_SET_216 TW_SET_192 ", " TW_SUMS_12("6")
#define TW_SET_224 TW_SET_192 ", " TW_SUMS_16("6")
#define TW_SET_232 TW_SET_224 ", " TW_SUMS_4("7")
#define TW_SET_240 TW_SET_224 ", " TW_SUMS_8("7")
#define TW_SET_248 TW_SET_224 ", " TW_SUMS_12("7")
#define TW_SET_256 TW_SET_224 ", " TW_SUMS_16("7")

// Calls f with Index<kBegin>, ..., Index<kEnd - 1>.
template <int kIndex>
struct Index {
  static constexpr int value = kIndex;
};
template <int kBegin, int kEnd, class F>
TW_SM90 void for_each_index(const F& f) {
  if constexpr (kBegin < kEnd) {
    f(Index<kBegin>{});
    for_each_index<kBegin + 1, kEnd>(f);
  }
}

// One product of kColumns columns: set kSet (+)= A x B. accumulate == 0: what the set held is dropped.
#define TW_PRODUCT(N)                                                                                    \
  template <class Text, int kSet>                                                                        \
  TW_SM90 void multiply_into(Index<N>, uint64_t a, uint64_t b, int accumulate) {                         \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\nwgmma.mma_async.sync.aligned.m64n" #N         \
                 "k%4 {" TW_SET_##N "}, %1, %2, p%5;\n}\n" ::"n"(kSet), "l"(a), "l"(b), "r"(accumulate), \
                 "C"(Text::types), "C"(Text::tail));                                                     \
  }
TW_PRODUCT(8) TW_PRODUCT(16) TW_PRODUCT(24) TW_PRODUCT(32) TW_PRODUCT(40) TW_PRODUCT(48)
TW_PRODUCT(56) TW_PRODUCT(64) TW_PRODUCT(72) TW_PRODUCT(80) TW_PRODUCT(88) TW_PRODUCT(96)
TW_PRODUCT(104) TW_PRODUCT(112) TW_PRODUCT(120) TW_PRODUCT(128) TW_PRODUCT(136) TW_PRODUCT(144)
TW_PRODUCT(152) TW_PRODUCT(160) TW_PRODUCT(168) TW_PRODUCT(176) TW_PRODUCT(184) TW_PRODUCT(192)
TW_PRODUCT(200) TW_PRODUCT(208) TW_PRODUCT(216) TW_PRODUCT(224) TW_PRODUCT(232) TW_PRODUCT(240)
TW_PRODUCT(248) TW_PRODUCT(256)
#undef TW_PRODUCT

// The type of a sum in an instruction.
template <class T>
struct AccumulatorText;
template <>
struct AccumulatorText<float> {
  static constexpr char type[] = "f32";
};
template <>
struct AccumulatorText<int32_t> {
  static constexpr char type[] = "s32";
};

// Elements of C in an instruction, where a conversion makes two of them in one register.
template <class E>
struct PairText;
template <>
struct PairText<fp16> {
  static constexpr char type[] = "f16x2";
};
template <>
struct PairText<bf16> {
  static constexpr char type[] = "bf16x2";
};

// Sums that are left elsewhere: the registers by fours, 16 bytes a thread, those of all threads side by side.
constexpr int kFourBytes = kWarpgroup * 16;

// kSets sets of kRegisters (a multiple of 4) each, fp32 or int32 (T), and kTaken chunks in which others arrive that are
// added to them. The last chunk of a set may be of 4, 8 or 12; what an array has beyond them is neither read nor
// written.
template <class T, int kSets, int kRegisters, int kTaken>
struct Accumulators {
  static constexpr int chunks = (kRegisters + kChunk - 1) / kChunk, count = kSets * chunks;
  // How many registers chunk q has.
  static TW_SM90 constexpr int size(int q) {
    return kRegisters - q % chunks * kChunk < kChunk ? kRegisters - q % chunks * kChunk : kChunk;
  }

  // At the kernel's beginning, once.
  static TW_SM90 void declare() {
    for_each_index<0, count>([](auto q) {
      asm volatile(".reg .b32 tw%0_%1_<%2>;" ::"n"(q.value / chunks), "n"(q.value % chunks), "n"(size(q.value)));
    });
    for_each_index<0, kTaken>(
        [](auto at) { asm volatile(".reg .b32 tw%0_%1_<16>;" ::"n"(kSets), "n"(at.value)); });
  }
  // kCount chunks from kFirst on become zero.
  template <int kFirst, int kCount>
  static TW_SM90 void clear() {
    for_each_index<kFirst, kFirst + kCount>([](auto q) { clear_chunk<q.value>(Index<size(q.value)>{}); });
  }
  // Adds chunk kFrom to chunk kTo.
  template <int kTo, int kFrom>
  static TW_SM90 void add() {
    add_chunk<kTo, kFrom / chunks, kFrom % chunks>(Index<size(kTo)>{});
  }
  // Where chunk q begins in what is left of all of them, in bytes; each thread adds 16 * its index.
  static TW_SM90 constexpr int place(int q) {
    return (q / chunks * kRegisters + q % chunks * kChunk) / 4 * kFourBytes;
  }
  // Chunk q to device memory at `base`; to shared memory of another workgroup, whose barrier counts the bytes (see
  // sm90/blocks/cluster.hpp, `send_words`).
  template <int q>
  static TW_SM90 void leave(char* base) {
    leave_chunk<q>(Index<size(q)>{}, base);
  }
  template <int q>
  static TW_SM90 void send(uint32_t base, uint32_t barrier) {
    send_chunk<q>(Index<size(q)>{}, base, barrier);
  }
  // Loads what was left of chunk q, from device memory that other multiprocessors write or from shared memory, on its
  // way into taken chunk kAt; and its addition.
  template <int q, int kAt>
  static TW_SM90 void take(const char* base) {
    take_chunk<q, kAt>(Index<size(q)>{}, base);
  }
  template <int q, int kAt>
  static TW_SM90 void take_shared(uint32_t base) {
    take_shared_chunk<q, kAt>(Index<size(q)>{}, base);
  }
  template <int q, int kAt>
  static TW_SM90 void add_taken() {
    add_chunk<q, kSets, kAt>(Index<size(q)>{});
  }
  // Chunk q of kFirst to kFirst + kCount - 1 to an array, by branches, so that loops need not be unrolled.
  template <int kCount, int kFirst = 0>
  static TW_SM90 void read(uint32_t (&x)[kChunk], int q) {
    if constexpr (kCount == 1) {
      read_chunk<kFirst>(Index<size(kFirst)>{}, x);
    } else {
      if (q < kFirst + kCount / 2) read<kCount / 2, kFirst>(x, q);
      else read<kCount - kCount / 2, kFirst + kCount / 2>(x, q);
    }
  }

  // The same, times `scale` and rounded to E, two neighbours in each of x[0], ..., x[7]. fp32 sums, 16-bit elements.
  template <class E, int kCount, int kFirst = 0>
  static TW_SM90 void read_pairs(uint32_t (&x)[kChunk], int q, float scale) {
    if constexpr (kCount == 1) {
      read_pairs_of<kFirst>(Index<size(kFirst)>{}, PairText<E>{}, x, scale);
    } else {
      if (q < kFirst + kCount / 2) read_pairs<E, kCount / 2, kFirst>(x, q, scale);
      else read_pairs<E, kCount - kCount / 2, kFirst + kCount / 2>(x, q, scale);
    }
  }

 private:
#define TW_PAIRS_4(X) X(0, 0, 1) X(1, 2, 3)
#define TW_PAIRS_8(X) TW_PAIRS_4(X) X(2, 4, 5) X(3, 6, 7)
#define TW_PAIRS_12(X) TW_PAIRS_8(X) X(4, 8, 9) X(5, 10, 11)
#define TW_PAIRS_16(X) TW_PAIRS_12(X) X(6, 12, 13) X(7, 14, 15)
#define TW_HALF_4(K) K(x[0]), K(x[1])
#define TW_HALF_8(K) TW_HALF_4(K), K(x[2]), K(x[3])
#define TW_HALF_12(K) TW_HALF_8(K), K(x[4]), K(x[5])
#define TW_HALF_16(K) TW_HALF_12(K), K(x[6]), K(x[7])
#define TW_EACH_4(X) X(0) X(1) X(2) X(3)
#define TW_EACH_8(X) TW_EACH_4(X) X(4) X(5) X(6) X(7)
#define TW_EACH_12(X) TW_EACH_8(X) X(8) X(9) X(10) X(11)
#define TW_EACH_16(X) TW_EACH_12(X) X(12) X(13) X(14) X(15)
#define TW_WORDS_4(K) K(x[0]), K(x[1]), K(x[2]), K(x[3])
#define TW_WORDS_8(K) TW_WORDS_4(K), K(x[4]), K(x[5]), K(x[6]), K(x[7])
#define TW_WORDS_12(K) TW_WORDS_8(K), K(x[8]), K(x[9]), K(x[10]), K(x[11])
#define TW_WORDS_16(K) TW_WORDS_12(K), K(x[12]), K(x[13]), K(x[14]), K(x[15])
#define TW_CLEAR(I) "mov.b32 tw%0_%1_" #I ", 0;\n"
#define TW_ADD(I) "add.%4 tw%0_%1_" #I ", tw%0_%1_" #I ", tw%2_%3_" #I ";\n"
#define TW_FOURS_4(X) X(3, 0, 1, 2, 3)
#define TW_FOURS_8(X) TW_FOURS_4(X) X(4, 4, 5, 6, 7)
#define TW_FOURS_12(X) TW_FOURS_8(X) X(5, 8, 9, 10, 11)
#define TW_FOURS_16(X) TW_FOURS_12(X) X(6, 12, 13, 14, 15)
#define TW_FOUR(I, J, K, L) "{tw%0_%1_" #I ", tw%0_%1_" #J ", tw%0_%1_" #K ", tw%0_%1_" #L "}"
#define TW_LEAVE(AT, I, J, K, L) "st.global.cg.v4.b32 [%2+%" #AT "], " TW_FOUR(I, J, K, L) ";\n"
#define TW_TAKE(AT, I, J, K, L) "ld.global.cg.v4.b32 " TW_FOUR(I, J, K, L) ", [%2+%" #AT "];\n"
#define TW_TAKE_SHARED(AT, I, J, K, L) "ld.shared.v4.b32 " TW_FOUR(I, J, K, L) ", [%2+%" #AT "];\n"
#define TW_SEND(AT, I, J, K, L) \
  "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%2+%" #AT "], " TW_FOUR(I, J, K, L) ", [%7];\n"
#define TW_PLACES(q) \
  "n"(place(q)), "n"(place(q) + kFourBytes), "n"(place(q) + 2 * kFourBytes), "n"(place(q) + 3 * kFourBytes)
#define TW_CHUNK_OF(N)                                                                              \
  template <int q>                                                                                  \
  static TW_SM90 void clear_chunk(Index<N>) {                                                       \
    asm volatile(TW_EACH_##N(TW_CLEAR)::"n"(q / chunks), "n"(q % chunks));                          \
  }                                                                                                 \
  template <int kTo, int kSet, int kAt>                                                             \
  static TW_SM90 void add_chunk(Index<N>) {                                                         \
    asm volatile(TW_EACH_##N(TW_ADD)::"n"(kTo / chunks), "n"(kTo % chunks), "n"(kSet), "n"(kAt),    \
                 "C"(AccumulatorText<T>::type));                                                            \
  }                                                                                                 \
  template <int q>                                                                                  \
  static TW_SM90 void leave_chunk(Index<N>, char* base) {                                           \
    asm volatile(TW_FOURS_##N(TW_LEAVE)::"n"(q / chunks), "n"(q % chunks), "l"(base), TW_PLACES(q)  \
                 : "memory");                                                                       \
  }                                                                                                 \
  template <int q>                                                                                  \
  static TW_SM90 void send_chunk(Index<N>, uint32_t base, uint32_t barrier) {                       \
    asm volatile(TW_FOURS_##N(TW_SEND)::"n"(q / chunks), "n"(q % chunks), "r"(base), TW_PLACES(q),  \
                 "r"(barrier)                                                                       \
                 : "memory");                                                                       \
  }                                                                                                 \
  template <int q, int kAt>                                                                         \
  static TW_SM90 void take_chunk(Index<N>, const char* base) {                                      \
    asm volatile(TW_FOURS_##N(TW_TAKE)::"n"(kSets), "n"(kAt), "l"(base), TW_PLACES(q) : "memory");  \
  }                                                                                                 \
  template <int q, int kAt>                                                                         \
  static TW_SM90 void take_shared_chunk(Index<N>, uint32_t base) {                                  \
    asm volatile(TW_FOURS_##N(TW_TAKE_SHARED)::"n"(kSets), "n"(kAt), "r"(base), TW_PLACES(q)        \
                 : "memory");                                                                       \
  }                                                                                                 \
  template <int q>                                                                                  \
  static TW_SM90 void read_chunk(Index<N>, uint32_t (&x)[kChunk]) {                                 \
    asm volatile(TW_EACH_##N(TW_READ_##N) : TW_WORDS_##N("=r") : "n"(q / chunks), "n"(q % chunks)); \
  }                                                                                                 \
  template <int q, class Pair>                                                                      \
  static TW_SM90 void read_pairs_of(Index<N>, Pair, uint32_t (&x)[kChunk], float scale) {           \
    asm volatile("{\n.reg .f32 low, high;\n" TW_PAIRS_##N(TW_PAIR_##N) "}"                          \
                 : TW_HALF_##N("=r")                                                                \
                 : "n"(q / chunks), "n"(q % chunks), "f"(scale), "C"(Pair::type));                  \
  }
#define TW_READ(I, A, B) "mov.b32 %" #I ", tw%" #A "_%" #B "_" #I ";\n"
#define TW_PAIR(W, I, J, A, B, S, C)                                                        \
  "mul.f32 low, tw%" #A "_%" #B "_" #I ", %" #S ";\nmul.f32 high, tw%" #A "_%" #B "_" #J    \
  ", %" #S ";\ncvt.rn.%" #C ".f32 %" #W ", high, low;\n"
#define TW_PAIR_4(W, I, J) TW_PAIR(W, I, J, 2, 3, 4, 5)
#define TW_PAIR_8(W, I, J) TW_PAIR(W, I, J, 4, 5, 6, 7)
#define TW_PAIR_12(W, I, J) TW_PAIR(W, I, J, 6, 7, 8, 9)
#define TW_PAIR_16(W, I, J) TW_PAIR(W, I, J, 8, 9, 10, 11)
#define TW_READ_4(I) TW_READ(I, 4, 5)
#define TW_READ_8(I) TW_READ(I, 8, 9)
#define TW_READ_12(I) TW_READ(I, 12, 13)
#define TW_READ_16(I) TW_READ(I, 16, 17)
  TW_CHUNK_OF(4) TW_CHUNK_OF(8) TW_CHUNK_OF(12) TW_CHUNK_OF(16)
};

// The sums of a GEMM's consumer: a set for each repeat; with promotion as many again, into which the tensor cores add.
constexpr int kTakenChunks = 4;  // where parts of tiles are added up: so many are on their way at once
template <class Plan>
using AccumulatorsOf = Accumulators<typename Plan::Accumulator, Plan::repeats*(Plan::promote ? 2 : 1),
                                    Plan::columns / 2, (Plan::partial || Plan::cluster_k > 1) ? kTakenChunks : 0>;

}  // namespace tw::sm90
