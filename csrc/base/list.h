/* list.h - a doubly linked list whose nodes are embedded in its entries. All zeros is an empty
 * list, and a node that is in none. No locking of its own. */
#ifndef RINGCOMM_LIST_H
#define RINGCOMM_LIST_H

#include <stddef.h>

typedef struct list_node {
    struct list_node *next, *prev;
    int is_in;
} list_node;

typedef struct list {
    list_node *head, *tail;
} list;

/* Returns the structure that a node is embedded in; NULL for no node. */
#define LIST_ENTRY(node, type, member)                                                             \
    ((node) == NULL ? NULL : (type *)(void *)((char *)(node) - offsetof(type, member)))

/* Appends a node, unless it is in the list already. */
static inline void list_append(list *l, list_node *node)
{
    if (node->is_in)
        return;
    *node = (list_node){.prev = l->tail, .is_in = 1};
    if (l->tail != NULL)
        l->tail->next = node;
    else
        l->head = node;
    l->tail = node;
}

/* Removes a node, if it is in the list. */
static inline void list_remove(list *l, list_node *node)
{
    if (!node->is_in)
        return;
    if (node->prev != NULL)
        node->prev->next = node->next;
    else
        l->head = node->next;
    if (node->next != NULL)
        node->next->prev = node->prev;
    else
        l->tail = node->prev;
    *node = (list_node){0};
}

/* Removes the first node and returns it; NULL if there is none. */
static inline list_node *list_pop(list *l)
{
    list_node *node = l->head;
    if (node != NULL)
        list_remove(l, node);
    return node;
}

#endif
