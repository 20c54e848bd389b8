//! How many chains a worker takes off its ring at once.
//!
//! A driver that waits for completions sleeps, and waking it costs some 10 us where it is on another core of a virtual
//! machine, as much as eight reads. So completions are shown many at a time; but not all at a time, or driver and worker
//! would wait for each other in turn. Half of what the driver keeps in flight lets both work: thousands of 4 KiB reads a
//! second at depths 4, 8, 16, 32, 64 are 230, 430, 520, 635, 650; with three quarters 227, 350, 360, 535, 630; with 16 at
//! all depths 155, 195, 330, 620, 660.

/// Chains in a batch at most: more gains nothing.
pub(crate) const CHAINS_PER_BATCH_MAX: usize = 32;

#[derive(Debug, Default)]
pub(crate) struct Batching {
    /// What the driver keeps in flight: the most that was seen lately. `None`: nothing is known of it.
    depth: Option<usize>,
}

impl Batching {
    /// To be called when a batch is done and not shown yet, with what the driver has in flight then.
    pub fn saw(&mut self, in_flight: usize) {
        let lately = self.depth.map_or(0, |depth| depth - depth.div_ceil(32));
        self.depth = Some(in_flight.max(lately));
    }

    /// Chains to take at most.
    pub fn chains(&self) -> usize {
        let half = |depth: usize| (depth / 2).clamp(1, CHAINS_PER_BATCH_MAX);
        self.depth.map_or(CHAINS_PER_BATCH_MAX, half)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(in_flight: &[usize]) -> usize {
        let mut batching = Batching::default();
        in_flight.iter().for_each(|seen| batching.saw(*seen));
        batching.chains()
    }

    #[test]
    fn the_first_batch_is_all_that_is_there() {
        assert_eq!(Batching::default().chains(), CHAINS_PER_BATCH_MAX);
    }

    #[test]
    fn a_batch_is_half_of_what_is_in_flight() {
        let chains = [0, 1, 2, 4, 8, 32, 40, 1000].map(|seen| after(&[seen]));
        assert_eq!(chains, [1, 1, 1, 2, 4, 16, 20, 32]);
    }

    #[test]
    fn a_moment_of_less_changes_little_and_a_while_of_less_does() {
        assert_eq!(after(&[32, 4, 4]), 15);
        let less: Vec<_> = std::iter::once(32).chain(std::iter::repeat_n(4, 100)).collect();
        assert_eq!(after(&less), 2);
    }
}
