/* rounds.h - which ranks exchange values in the all-reduces of logarithmic depth.
 *
 * Doubling. In each exchange a rank gives its sum to a partner twice as far away as the one before,
 * so all have the whole sum after log2 N exchanges. Where the world is no power of two, the first
 * ranks stand in for each other: of the ranks below 2 (N - 2^k) each even one gives its values to
 * the next one before the exchanges, and gets the result after them. The 2^k ranks left over
 * exchange, in order of rank:
 *
 *   6 ranks     0->1   2->3        4        5        before
 *                  1<->3           4<------>5        distance 1
 *                  1<------------->4                 distance 2
 *                           3<------------->5
 *               0<-1   2<-3                          after
 *
 * Halving. Each part of the tensor is summed at its owner along a tree, and goes back along it. The
 * trees are so laid that in each round all that a rank sends goes to one other, half of what it has
 * left. With distance d before the owner, and s = N, ceil(N/2), ..., 2, 1:
 *
 *   round k: a rank with s[k] <= d < s[k-1] sends to distance d - s[k]
 *
 * So 2 ceil(log2 N) rounds suffice for any N, with the 2 (N-1)/N S bytes of the ring. For powers of
 * two it is Rabenseifner's algorithm, with every rank sending forward instead of exchanges in
 * pairs; for the others Träff's ("Optimal, Non-pipelined Reduce-scatter and Allreduce Algorithms",
 * 2024).
 *
 * Both list a rank's peers in the order in which it takes their values; the sums depend on it.
 * Pure: no state, no OS, no allocation.
 */
#ifndef RINGCOMM_ROUNDS_H
#define RINGCOMM_ROUNDS_H

#include <stdint.h>

/* Returns 1 if another rank stands in for this one in the exchanges. */
int doubling_sits_out(int rank, int world_size);
/* Returns 1 if this rank stands in for the one before it, which then is its first peer. */
int doubling_stands_in(int rank, int world_size);
/* Return the number of peers: its stand-in alone, or all whose values it takes; and the peer of a
 * turn. */
uint32_t doubling_peers(int rank, int world_size);
int doubling_peer(int rank, int world_size, uint32_t turn);

/* Return the number of ranks that send to the one at this distance before the owner, and how far
 * each is from the owner. */
uint32_t halving_children(uint32_t distance, uint32_t world_size);
uint32_t halving_child(uint32_t distance, uint32_t world_size, uint32_t turn);
/* Returns the distance of the rank that it sends to: smaller than distance, which must not be 0. */
uint32_t halving_parent(uint32_t distance, uint32_t world_size);

#endif
