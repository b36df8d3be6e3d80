/* rounds.h - who meets whom in the all-reduces of logarithmic depth.
 *
 * Doubling. Ranks exchange what they have with a partner twice as far away each time, so all have
 * everything after log2 of them. Where the world is no power of two, the first ranks stand in for
 * each other: of the ranks below 2 (N - 2^k) each even one gives its values to the next one before
 * the exchanges, and gets the result after them. Those left over are 2^k, in order of rank:
 *
 *   6 ranks     0->1   2->3        4        5        before
 *                  1<->3           4<------>5        distance 1
 *                  1<------------->4                 distance 2
 *                           3<------------->5
 *               0<-1   2<-3                          after
 *
 * Halving. Each part of the tensor comes together at its owner along a tree, and goes back along
 * it. The trees are so laid that in each round all that a rank sends goes to one other, half of
 * what it has left. With distance d before the owner, and s = N, ceil(N/2), ..., 2, 1:
 *
 *   round k: a rank with s[k] <= d < s[k-1] sends to distance d - s[k]
 *
 * So 2 ceil(log2 N) rounds do for any N, with the 2 (N-1)/N S bytes of the ring. For powers of two
 * it is Rabenseifner's algorithm, with everyone sending forward in place of pairs that exchange;
 * for the others Träff's ("Optimal, Non-pipelined Reduce-scatter and Allreduce Algorithms", 2024).
 *
 * Both list a rank's peers in the order in which it takes what they have; the sums depend on it.
 * Pure: no state, no OS, no allocation.
 */
#ifndef RINGCOMM_ROUNDS_H
#define RINGCOMM_ROUNDS_H

#include <stdint.h>

/* 1 if another rank stands in for this one in the exchanges. */
int doubling_sits_out(int rank, int world_size);
/* 1 if this rank stands in for the one before it, which then is its first peer. */
int doubling_stands_in(int rank, int world_size);
/* Ranks that this one meets: its stand-in alone, or all whose values it takes. */
uint32_t doubling_peers(int rank, int world_size);
int doubling_peer(int rank, int world_size, uint32_t turn);

/* Ranks that send to the one at this distance before the owner, and how far each is from the
 * owner. */
uint32_t halving_children(uint32_t distance, uint32_t world_size);
uint32_t halving_child(uint32_t distance, uint32_t world_size, uint32_t turn);
/* Where it sends: smaller than distance, which must not be 0. */
uint32_t halving_parent(uint32_t distance, uint32_t world_size);

#endif
