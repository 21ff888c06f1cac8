// What every translated kernel shares: arithmetic of PTX where C's differs, and the order in which lanes run.
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef unsigned __int128 u128;
typedef int8_t s8;
typedef int16_t s16;
typedef int32_t s32;
typedef int64_t s64;

enum { BARRIER, BALLOT, BLOCK, BUTTERFLY, INDEX, UP, DOWN };
enum { ENDED, WAITS, TRAPPED, MISALIGNED, DIVIDED, HANGS, DIVERGED, ABSENT };
#define FAULT(kind, line) return (u32)(line) << 3 | (kind)

// A lane of the warp. A lane that waits has put here what it takes part in.
struct lane {
  u32 at, line, kind, value, by, clamp, mask, result, inside;
  u64 turns;
};
// Runs a lane until it ends or waits.
typedef u32 run_lane(struct lane *, const u8 *const *, u8 *, u32 tid, u32 cta, u32 ntid, u32 ncta);

static inline float F(u64 bits) { u32 low = (u32)bits; float x; memcpy(&x, &low, 4); return x; }
static inline double D(u64 bits) { double x; memcpy(&x, &bits, 8); return x; }
// Results that are NaN are the device's one NaN.
static inline u32 U(float x) { u32 bits; memcpy(&bits, &x, 4); return x != x ? 0x7fffffffu : bits; }
static inline u64 UD(double x) { u64 bits; memcpy(&bits, &x, 8); return x != x ? 0x7fffffffffffffffull : bits; }
static inline float maximum(float a, float b) {
  if (a != a) return b;
  if (b != b || a > b) return a;
  return a < b || signbit(a) ? b : a;
}
static inline float minimum(float a, float b) { return -maximum(-a, -b); }
static inline u32 to_s32(float x) {
  return x != x ? 0 : x >= 0x1p31f ? 0x7fffffffu : x < -0x1p31f ? 0x80000000u : (u32)(s32)x;
}
static inline u32 to_u32(float x) { return !(x > 0) ? 0 : x >= 0x1p32f ? ~0u : (u32)x; }
// Fields of bits: a start past the top gives copies of the sign, or 0.
static inline u32 field(u32 x, u32 from, u32 count) {
  from &= 255, count &= 255;
  u32 shifted = from > 31 ? 0 : x >> from;
  return count > 31 ? shifted : shifted & ((1u << count) - 1);
}
static inline u64 wide_field(u64 x, u32 from, u32 count) {
  from &= 255, count &= 255;
  u64 shifted = from > 63 ? 0 : x >> from;
  return count > 63 ? shifted : shifted & ((1ull << count) - 1);
}
static inline u32 signed_field(u32 x, u32 from, u32 count) {
  from &= 255, count &= 255;
  if (count == 0) return 0;
  u32 last = from + count - 1;
  u32 sign = x >> (last > 31 ? 31 : last) & 1, value = field(x, from, count), kept = from > 31 ? 0 : 32 - from;
  if (count < kept) kept = count;
  return kept > 31 || !sign ? value : value | ~0u << kept;
}
// `{high, low}` shifted to the left or the right.
static inline u32 funnel_left(u32 low, u32 high, u32 by) { return (u32)(((u64)high << 32 | low) << (by & 31) >> 32); }
static inline u32 funnel_right(u32 low, u32 high, u32 by) { return (u32)(((u64)high << 32 | low) >> (by & 31)); }
static inline u32 reversed(u32 x) {
  u32 y = 0;
  for (int i = 0; i < 32; i++) y |= (x >> i & 1) << (31 - i);
  return y;
}

// The lane that a shuffle reads, and whether that lies within its segment.
static u32 source(const struct lane *of, u32 lane, u32 *inside) {
  u32 by = of->by & 31, clamp = of->clamp & 31, segment = of->clamp >> 8 & 31;
  u32 low = lane & segment, high = low | (clamp & ~segment);
  s32 from;
  switch (of->kind) {
  case BUTTERFLY: from = lane ^ by, *inside = from <= (s32)high; break;
  case INDEX: from = low | (by & ~segment), *inside = from <= (s32)high; break;
  case UP: from = (s32)lane - (s32)by, *inside = from >= (s32)high; break;
  default: from = lane + by, *inside = from <= (s32)high;
  }
  return *inside ? (u32)from : lane;
}

// Completes what the lanes of a mask all wait for. Returns 0, or what is wrong.
static u32 together(struct lane *const *lanes, u32 mask, u32 *who) {
  u32 ballot = 0;
  for (u32 i = 0; i < 32; i++)
    if (mask >> i & 1 && lanes[i]->kind == BALLOT) ballot |= (lanes[i]->value & 1) << i;
  for (u32 i = 0; i < 32; i++) {
    if (!(mask >> i & 1)) continue;
    struct lane *of = lanes[i];
    of->result = ballot;
    if (of->kind < BUTTERFLY) continue;
    u32 from = source(of, i, &of->inside);
    if (!(mask >> from & 1)) { *who = i; return ABSENT; }
    of->result = lanes[from]->value;
  }
  return 0;
}

// Runs a warp. Each lane runs as far as it can alone, the lowest first or the highest first, until all that are asked for by a barrier, a
// ballot or a shuffle are there: what a lane does without waiting for another is as early or as late as it can be. `*ended` are the lanes
// that have ended. Returns WAITS at a barrier of the block.
static u32 run_warp(run_lane *run, struct lane *const *lanes, const u8 *const *P, u8 *shared, u32 first, u32 cta, u32 ntid,
                    u32 ncta, u32 highest, u32 *ended, u32 *who) {
  u32 live = ~*ended, ready = live;
  while (live) {
    for (u32 n = 0; n < 32; n++) {
      u32 i = highest ? 31 - n : n;
      if (!(ready >> i & 1)) continue;
      u32 code = run(lanes[i], P, shared, first + i, cta, ntid, ncta);
      if (code == ENDED) live &= ~(1u << i), *ended = ~live;
      else if (code != WAITS) { *who = i; return code; }
    }
    ready = 0;
    for (u32 i = 0; i < 32; i++) {
      if (!(live >> i & 1) || ready >> i & 1) continue;
      u32 mask = lanes[i]->mask, there = 0;
      for (u32 j = 0; j < 32; j++)
        if (live >> j & 1 && lanes[j]->at == lanes[i]->at && lanes[j]->mask == mask) there |= 1u << j;
      if (!(mask >> i & 1)) { *who = i; return DIVERGED; }
      if ((there & mask) != mask) continue;
      if (lanes[i]->kind == BLOCK) return WAITS;
      u32 code = together(lanes, mask, who);
      if (code) return code;
      ready |= mask;
    }
    if (live && !ready) { *who = __builtin_ctz(live); return DIVERGED; }
  }
  return 0;
}

// Runs all blocks and their warps, in the order of lanes, each warp up to its end or a barrier of the block. `size`: of a lane with its
// registers; they hold junk at first.
static u32 run_grid(run_lane *run, size_t size, size_t shared_bytes, const u8 *const *P, u32 grid, u32 block, u32 highest, u32 *where) {
  u8 *state = malloc(block * size), *shared = aligned_alloc(128, (shared_bytes + 128) / 128 * 128);
  struct lane *lanes[1024];
  u32 code = 0, warps = block / 32, ended[32];
  memset(state, 0xad, block * size);
  for (u32 i = 0; i < block; i++) lanes[i] = (struct lane *)(state + i * size);
  for (u32 n = 0; n < grid && !code; n++) {
    u32 cta = highest ? grid - 1 - n : n, waits;
    memset(shared, 0xad, shared_bytes);
    for (u32 i = 0; i < block; i++) lanes[i]->at = 0, lanes[i]->turns = 1 << 26;
    memset(ended, 0, sizeof ended);
    do {
      waits = 0;
      for (u32 m = 0; m < warps && !code; m++) {
        u32 w = highest ? warps - 1 - m : m;
        if (!~ended[w]) continue;
        where[0] = cta * warps + w;
        code = run_warp(run, lanes + 32 * w, P, shared, w * 32, cta, block, grid, highest, ended + w, where + 1);
        if (code == WAITS) waits++, code = 0;
        if (code > 0 && code < 8) code |= lanes[32 * w + where[1]]->line << 3;
      }
      // Warps that have ended never reach a barrier at which others wait.
      if (!code && waits && waits < warps) code = DIVERGED, where[1] = 0;
    } while (waits && !code);
  }
  free(state);
  free(shared);
  return code;
}
