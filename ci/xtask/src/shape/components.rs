//! Strongly connected components of a directed graph (Tarjan's algorithm).

use std::collections::{BTreeMap, BTreeSet};

/// The nodes, each with those that it points to.
pub type Graph<N> = BTreeMap<N, BTreeSet<N>>;

/// Returns the components of more than one node: the largest first, those of one size in order, and each of them sorted.
pub fn components<N: Clone + Ord>(graph: &Graph<N>) -> Vec<Vec<N>> {
    let mut search = Search { graph, order: BTreeMap::new(), stack: Vec::new(), found: Vec::new() };
    for node in graph.keys() {
        if !search.order.contains_key(node) {
            search.visit(node);
        }
    }
    let mut found = search.found;
    found.sort_by(|a, b| b.len().cmp(&a.len()).then_with(|| a.cmp(b)));
    found
}

struct Search<'a, N> {
    graph: &'a Graph<N>,
    /// The nodes that were visited, with their ranks.
    order: BTreeMap<&'a N, usize>,
    /// The nodes on the stack, whose components are not complete.
    stack: Vec<&'a N>,
    found: Vec<Vec<N>>,
}

impl<'a, N: Clone + Ord> Search<'a, N> {
    /// Visits a node and all nodes that it reaches. Returns the lowest rank on the stack that it reaches.
    fn visit(&mut self, node: &'a N) -> usize {
        let (graph, rank, start) = (self.graph, self.order.len(), self.stack.len());
        self.order.insert(node, rank);
        self.stack.push(node);
        let mut lowest = rank;
        for next in graph.get(node).into_iter().flatten() {
            let reached = match self.order.get(next).copied() {
                None => self.visit(next),
                Some(known) if self.stack.contains(&next) => known,
                Some(_) => continue,
            };
            lowest = lowest.min(reached);
        }
        if lowest == rank {
            let mut component: Vec<N> = self.stack.drain(start..).cloned().collect();
            component.sort();
            if component.len() > 1 {
                self.found.push(component);
            }
        }
        lowest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(arrows: &[&str]) -> Vec<String> {
        let mut graph: Graph<char> = BTreeMap::new();
        for arrow in arrows {
            let mut nodes = arrow.chars();
            if let (Some(from), Some(to)) = (nodes.next(), nodes.next()) {
                graph.entry(from).or_default().insert(to);
            }
        }
        components(&graph).into_iter().map(|nodes| nodes.into_iter().collect()).collect()
    }

    #[test]
    fn a_graph_without_cycles_has_no_components() {
        assert!(found(&["ab", "bc", "ac", "aa"]).is_empty());
        assert!(found(&[]).is_empty());
    }

    #[test]
    fn cycles_are_found_whole() {
        assert_eq!(found(&["ab", "ba"]), ["ab"]);
        assert_eq!(found(&["ab", "bc", "cd", "db", "da"]), ["abcd"]);
        // Two cycles that share a node are one component.
        assert_eq!(found(&["ab", "ba", "bc", "cb"]), ["abc"]);
    }

    #[test]
    fn the_largest_comes_first() {
        assert_eq!(found(&["ab", "ba", "bx", "xy", "yz", "zx"]), ["xyz", "ab"]);
        assert_eq!(found(&["cd", "dc", "ab", "ba"]), ["ab", "cd"]);
    }
}
