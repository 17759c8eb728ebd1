// Launch arguments of every attention kernel, on every device: one plain-old-data struct, the same bytes on host and
// device. The Python side packs it field by field in this order (tilewright_fmha/launch/kernel_args.py); what a kernel
// does not use is null or zero. A CPU gets it by pointer, a GPU by value. All fields are 8-byte aligned.
//
// "Row" i is a query, "column" j a key; both count within their own sequence.
#pragma once
#include "tilewright/core/integers.hpp"

// Element (b, h, r, c) lies at b*batch + h*head + r*row + c*col; strides are in elements, and 0 broadcasts. Where
// sequences of different lengths follow each other (varlen), r counts through all of them and batch is 0. In a paged
// cache `batch` goes from page to page and r is the token's place in its page. A vectorised cache keeps x = 16 /
// sizeof(element) values side by side: those of k are at (c/x)*chunk + r*row + c%x, those of v at (r/x)*chunk + c*col +
// r%x.
typedef struct tw_fmha_tensor {
  const void* ptr;
  int64_t batch, head, row, col, chunk;
} tw_fmha_tensor;

// Scale factors of 8-bit values, fp32: block r / block_rows of (b, h) at b*batch + h*head + (r/block_rows)*block.
// block_rows 0: one value for each (b, h). One value for each page of a cache: `batch` goes from page to page.
typedef struct tw_fmha_scale {
  const float* ptr;
  int64_t batch, head, block, block_rows;
} tw_fmha_scale;

typedef struct tw_fmha_args {
  // lse: (b, h, row). randval: bytes. Appending: k, v are the caches that are written (k_past, v_past what they hold
  // before, often the same memory), k_new, v_new the new rows, and q goes to o with its positions' rotation.
  tw_fmha_tensor q, k, v, o, lse, bias, randval, d_o, dq, dk, dv, dbias, k_new, v_new, k_past, v_past;
  tw_fmha_scale q_scale, k_scale, v_scale;
  const int32_t *cu_q, *cu_k;   // [batch + 1]: where sequences begin and end (varlen)
  const int32_t *len_q, *len_k;  // [batch]: true lengths, not above the room that there is
  // vLLM: [batch][table_stride] page numbers. SGLang: table_stride of them in all, those of item b from page_starts[b]
  // to page_starts[b + 1].
  const int32_t *block_table, *page_starts;
  const int32_t* cache_index;    // [batch]: the item of k and v that belongs to each
  const float *slopes, *sinks;   // ALiBi: at b*slope_batch + h; learned sinks: [heads_q]
  float* dsinks;
  const void *rot_cos, *rot_sin;  // [positions][rotary_dim / 2], rotary_stride elements apart, of type Config::Rot
  const int32_t* rng;             // seed low, seed high, offset, 0: instead of the fields below
  int32_t* status;                // [4]: bits (fmha_item.hpp), the first item concerned, its length or page, 0
  int32_t* lens_out;              // [batch]: lengths after an append; may be len_k
  // Dense fp32: delta [b][h][seq_q] (varlen: [h][total_q]); dq_acc [split][b][h][seq_q][pad] (varlen:
  // [split][h][total_q][pad]); o_acc likewise, lse_acc without its last dimension. pad is the config's hdim of q
  // (dq_acc) or v (o_acc).
  float *delta, *dq_acc, *dbias_acc, *o_acc, *lse_acc;
  void* workspace;     // scratch, 64-byte aligned (CPUs)
  uint32_t* counters;  // zero when the launch begins; it leaves them zero (GPUs)
  // Capacities: of varlen, seq_q and seq_k are the longest sequence allowed. cache_items: items of a cache without
  // pages.
  int64_t batch, heads_q, heads_k, seq_q, seq_k, hdim_q, hdim_v, total_q, total_k;
  int64_t table_stride, page_size, num_pages, cache_items;
  int64_t slope_batch;
  int64_t left, right, bottom_right, sink_size;  // which columns a row sees: fmha_visible in fmha_item.hpp
  int64_t seed, offset, drop_below;              // dropout: see core/philox.hpp
  int64_t splits, split_rows;      // parts of the keys; rows of each, or 0: an equal share of what there is to see
  // ceil(seq_q / m0) (packed GQA: ceil(seq_q * group / m0)), ceil(seq_k / n0) (appending: positions of the rotary
  // tables), work items in all.
  int64_t q_tiles, k_tiles, tiles;
  int64_t new_rows, rotary_dim, rotary_stride, workspace_bytes;
  int64_t min_q;                           // items with fewer queries are not computed: o = 0, lse = -inf
  double scale, softcap, keep_scale, p_scale;  // p_scale: what P is multiplied by before it is rounded to 8 bits
} tw_fmha_args;

#ifdef __cplusplus
static_assert(sizeof(tw_fmha_tensor) == 48 && sizeof(tw_fmha_scale) == 40 && sizeof(tw_fmha_args) == 1344,
              "the Python side packs these bytes");

// Hopper: tensor maps of q, k, v and o (gradients: do), then the arguments.
typedef struct alignas(64) tw_fmha_ws_params {
  unsigned char maps[4][128];
  tw_fmha_args args;
} tw_fmha_ws_params;
static_assert(sizeof(tw_fmha_ws_params) == 1856, "the Python side packs these bytes");
#endif
