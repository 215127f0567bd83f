//! Keeps which templates exist, are wanted or have failed, and how often pods could start from one. Pure: it accesses no file.

use super::key::TemplateKey;
use nacelle_pod::template::TemplateShape;
use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};

/// The most templates that may be wanted at a time; further ones are not built.
const MAX_WANTED: usize = 16;
/// The most failed builds that are remembered.
const MAX_FAILED: usize = 64;
/// The time after which a failed build is tried again, doubled with each failure.
const FIRST_RETRY: Duration = Duration::from_secs(10);
const MAX_RETRY: Duration = Duration::from_secs(600);

/// Why a pod did not start from a template.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum MissReason {
    /// The template is not built yet.
    NotBuilt,
    /// Its build has failed.
    BuildFailed,
    /// The pod brings a kernel of its own.
    OwnKernel,
    /// Its memory consists of huge pages of the node's pool.
    HugePages,
    /// Its memory is too large for a template.
    Memory,
    /// The pod process could not use the template.
    Unusable,
}

impl fmt::Display for MissReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            MissReason::NotBuilt => "not built yet",
            MissReason::BuildFailed => "its build has failed",
            MissReason::OwnKernel => "the pod has a kernel of its own",
            MissReason::HugePages => "the memory is in huge pages",
            MissReason::Memory => "too much memory",
            MissReason::Unusable => "the template could not be used",
        })
    }
}

/// What a template is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TemplateFor {
    /// The VMs.
    pub shape: TemplateShape,
    /// The only namespace; `None`: all.
    pub namespace: Option<String>,
}

/// The state of a template.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum TemplateState {
    /// It is to be built.
    Wanted,
    /// Its process runs.
    Building,
    /// Pods start from it.
    Ready {
        /// The memory that its files take.
        bytes: u64,
    },
    /// It could not be built.
    Failed {
        /// The cause.
        why: String,
        /// From then on the template is built if a pod wants it.
        retry_at: Instant,
    },
}

/// A template in the catalogue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TemplateEntry {
    pub content: TemplateFor,
    pub state: TemplateState,
    /// The number of pods that started from it since the daemon began.
    pub uses: u64,
    /// When it was last used or built: a number that grows.
    last_use: u64,
    /// The number of builds that have failed since the last one that succeeded.
    failures: u32,
}

impl TemplateEntry {
    fn new(content: TemplateFor, state: TemplateState) -> TemplateEntry {
        TemplateEntry { content, state, uses: 0, last_use: 0, failures: 0 }
    }
}

/// The templates of a node.
#[derive(Debug, Default)]
pub(crate) struct TemplateCatalogue {
    entries: BTreeMap<TemplateKey, TemplateEntry>,
    last_use: u64,
    /// The pods that started from a template.
    pub hits: u64,
    /// The pods that did not.
    pub misses: BTreeMap<MissReason, u64>,
}

impl TemplateCatalogue {
    /// Adds a template that an earlier daemon has built.
    pub(crate) fn insert_ready(&mut self, key: TemplateKey, content: TemplateFor, bytes: u64) {
        self.entries.insert(key, TemplateEntry::new(content, TemplateState::Ready { bytes }));
    }

    /// Counts a pod that wants this template, and returns whether it may start from it. A missing one becomes wanted.
    pub(crate) fn find(&mut self, key: &TemplateKey, content: TemplateFor, now: Instant) -> Result<(), MissReason> {
        match self.want(key, content, now) {
            Some(TemplateState::Ready { .. }) => {
                self.hits += 1;
                self.last_use += 1;
                if let Some(entry) = self.entries.get_mut(key) {
                    entry.uses += 1;
                    entry.last_use = self.last_use;
                }
                Ok(())
            }
            Some(TemplateState::Failed { .. }) => Err(self.miss(MissReason::BuildFailed)),
            Some(TemplateState::Wanted | TemplateState::Building) | None => Err(self.miss(MissReason::NotBuilt)),
        }
    }

    /// Makes the template wanted if it is missing, or if its build has failed some time ago. Returns its state; `None` if too many
    /// are wanted already.
    pub(crate) fn want(&mut self, key: &TemplateKey, content: TemplateFor, now: Instant) -> Option<TemplateState> {
        let has_room = self.entries.values().filter(|entry| entry.state == TemplateState::Wanted).count() < MAX_WANTED;
        match self.entries.get_mut(key) {
            Some(entry) => {
                if has_room && matches!(&entry.state, TemplateState::Failed { retry_at, .. } if *retry_at <= now) {
                    entry.state = TemplateState::Wanted;
                }
                Some(entry.state.clone())
            }
            None if has_room => {
                self.entries.insert(key.clone(), TemplateEntry::new(content, TemplateState::Wanted));
                Some(TemplateState::Wanted)
            }
            None => None,
        }
    }

    /// Counts a pod that does not start from a template, for this reason.
    pub(crate) fn miss(&mut self, reason: MissReason) -> MissReason {
        *self.misses.entry(reason).or_default() += 1;
        reason
    }

    /// Returns a template that is to be built now.
    pub(crate) fn begin_build(&mut self) -> Option<(TemplateKey, TemplateFor)> {
        let (key, entry) = self.entries.iter_mut().find(|(_, entry)| entry.state == TemplateState::Wanted)?;
        entry.state = TemplateState::Building;
        Some((key.clone(), entry.content.clone()))
    }

    /// Records that a template was built, unless it was dropped meanwhile: then returns false.
    pub(crate) fn end_build(&mut self, key: &TemplateKey, bytes: u64) -> bool {
        self.last_use += 1;
        let Some(entry) = self.entries.get_mut(key) else { return false };
        entry.state = TemplateState::Ready { bytes };
        (entry.last_use, entry.failures) = (self.last_use, 0);
        true
    }

    /// Records that a template could not be built.
    pub(crate) fn fail_build(&mut self, key: &TemplateKey, why: String, now: Instant) {
        let failed = self.entries.values().filter(|entry| matches!(entry.state, TemplateState::Failed { .. })).count();
        let Some(entry) = self.entries.get_mut(key) else { return };
        if failed >= MAX_FAILED {
            self.entries.remove(key);
            return;
        }
        let wait = FIRST_RETRY.saturating_mul(1_u32.checked_shl(entry.failures).unwrap_or(u32::MAX)).min(MAX_RETRY);
        entry.failures = entry.failures.saturating_add(1);
        entry.state = TemplateState::Failed { why, retry_at: now + wait };
    }

    /// Removes a template; returns whether there was one.
    pub(crate) fn remove(&mut self, key: &TemplateKey) -> bool {
        self.entries.remove(key).is_some()
    }

    /// Removes the templates that were not used for the longest time, until the others take at most `max` bytes; the one that was
    /// used last stays. Returns their keys.
    pub(crate) fn evict(&mut self, max: u64) -> Vec<TemplateKey> {
        let mut ready: Vec<_> =
            self.entries.iter().filter_map(|(key, entry)| Some((entry.last_use, key, entry.bytes()?))).collect();
        ready.sort();
        let mut total: u64 = ready.iter().map(|(_, _, bytes)| bytes).sum();
        ready.pop();
        let mut evicted = Vec::new();
        for (_, key, bytes) in ready {
            if total <= max {
                break;
            }
            total -= bytes;
            evicted.push(key.clone());
        }
        evicted.iter().for_each(|key| drop(self.entries.remove(key)));
        evicted
    }

    /// Returns all templates.
    pub(crate) fn entries(&self) -> impl Iterator<Item = (&TemplateKey, &TemplateEntry)> {
        self.entries.iter()
    }

    /// Returns the state of a template.
    pub(crate) fn state(&self, key: &TemplateKey) -> Option<&TemplateState> {
        self.entries.get(key).map(|entry| &entry.state)
    }
}

impl TemplateEntry {
    fn bytes(&self) -> Option<u64> {
        match self.state {
            TemplateState::Ready { bytes } => Some(bytes),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_base::machine::ConsoleKind;

    fn key(number: u32) -> TemplateKey {
        TemplateKey::parse(&format!("{number:016x}")).unwrap()
    }

    fn content(vcpus: u32) -> TemplateFor {
        let shape = TemplateShape {
            vcpus,
            max_vcpus: vcpus,
            memory_mib: 256,
            console: ConsoleKind::Serial,
            kernel: "/k".into(),
            initrd: "/i".into(),
            kernel_args: vec![],
        };
        TemplateFor { shape, namespace: None }
    }

    #[test]
    fn a_missing_template_is_built_and_then_used() {
        let (mut catalogue, now) = (TemplateCatalogue::default(), Instant::now());
        for _ in 0..2 {
            assert_eq!(catalogue.find(&key(1), content(1), now), Err(MissReason::NotBuilt));
        }
        assert_eq!(catalogue.begin_build(), Some((key(1), content(1))));
        assert_eq!(catalogue.begin_build(), None, "one build is enough");
        assert_eq!(catalogue.find(&key(1), content(1), now), Err(MissReason::NotBuilt));
        assert!(catalogue.end_build(&key(1), 30));
        assert_eq!(catalogue.find(&key(1), content(1), now), Ok(()));
        assert_eq!((catalogue.hits, catalogue.misses.get(&MissReason::NotBuilt)), (1, Some(&3)));
        assert_eq!(catalogue.entries().map(|(_, entry)| entry.uses).collect::<Vec<_>>(), [1]);
        // It may be dropped while it is built.
        assert!(catalogue.remove(&key(1)) && !catalogue.remove(&key(1)));
        assert!(!catalogue.end_build(&key(1), 30));
    }

    #[test]
    fn a_failed_build_is_repeated_after_growing_times() {
        let (mut catalogue, mut now) = (TemplateCatalogue::default(), Instant::now());
        assert_eq!(catalogue.find(&key(1), content(1), now), Err(MissReason::NotBuilt));
        for wait in [10, 20, 40, 80, 160, 320, 600, 600] {
            assert!(catalogue.begin_build().is_some());
            catalogue.fail_build(&key(1), "no kernel".into(), now);
            let early = now + Duration::from_secs(wait) - Duration::from_millis(1);
            assert_eq!(catalogue.find(&key(1), content(1), early), Err(MissReason::BuildFailed));
            now += Duration::from_secs(wait);
            assert_eq!(catalogue.find(&key(1), content(1), now), Err(MissReason::NotBuilt), "{wait}");
        }
        catalogue.begin_build().unwrap();
        catalogue.end_build(&key(1), 1);
        assert_eq!(catalogue.find(&key(1), content(1), now), Ok(()));
    }

    #[test]
    fn the_least_recently_used_templates_are_evicted() {
        let (mut catalogue, now) = (TemplateCatalogue::default(), Instant::now());
        for number in 1..=4 {
            catalogue.want(&key(number), content(number), now);
            catalogue.begin_build().unwrap();
            catalogue.end_build(&key(number), 30);
        }
        catalogue.find(&key(1), content(1), now).unwrap();
        assert_eq!(catalogue.evict(120), []);
        assert_eq!(catalogue.evict(119), [key(2)]);
        assert_eq!(catalogue.evict(1), [key(3), key(4)], "the last one stays");
        assert_eq!(catalogue.find(&key(1), content(1), now), Ok(()));
    }

    #[test]
    fn the_numbers_of_wanted_and_failed_templates_are_limited() {
        let (mut catalogue, now) = (TemplateCatalogue::default(), Instant::now());
        for number in 0..1000 {
            catalogue.find(&key(number), content(number), now).unwrap_err();
        }
        assert_eq!(catalogue.entries().count(), MAX_WANTED);
        for number in 0..1000 {
            catalogue.find(&key(number), content(number), now).unwrap_err();
            while let Some((key, _)) = catalogue.begin_build() {
                catalogue.fail_build(&key, "no kernel".into(), now);
            }
        }
        assert!(catalogue.entries().count() <= MAX_FAILED + MAX_WANTED);
    }
}
