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
/// The number of pods in a row that fail to start before their template is removed.
const MAX_FAILED_STARTS: u32 = 2;

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
    /// No template has a memory near its own.
    Memory,
    /// The pod process could not use the template.
    Unusable,
}

impl MissReason {
    /// All reasons.
    pub(crate) const ALL: [MissReason; 6] = [
        MissReason::NotBuilt,
        MissReason::BuildFailed,
        MissReason::OwnKernel,
        MissReason::HugePages,
        MissReason::Memory,
        MissReason::Unusable,
    ];

    /// Returns the reason as a label of a metric.
    pub(crate) fn label(self) -> &'static str {
        match self {
            MissReason::NotBuilt => "not_built",
            MissReason::BuildFailed => "build_failed",
            MissReason::OwnKernel => "own_kernel",
            MissReason::HugePages => "huge_pages",
            MissReason::Memory => "memory",
            MissReason::Unusable => "unusable",
        }
    }
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
    /// When its state changed or a pod found it: a number that grows.
    last_change: u64,
    /// The number of builds that have failed since the last one that succeeded.
    failed_builds: u32,
    /// The number of pods that could not start from it since the last one that could.
    failed_starts: u32,
    /// Distinguishes the template that pods found from a later one with this key.
    generation: u64,
}

/// The templates of a node.
#[derive(Debug, Default)]
pub(crate) struct TemplateCatalogue {
    entries: BTreeMap<TemplateKey, TemplateEntry>,
    last_change: u64,
    /// The pods that started from a template.
    pub hits: u64,
    /// The pods that did not.
    pub misses: BTreeMap<MissReason, u64>,
}

impl TemplateCatalogue {
    fn next_change(&mut self) -> u64 {
        self.last_change += 1;
        self.last_change
    }

    fn insert(&mut self, key: TemplateKey, content: TemplateFor, state: TemplateState) {
        let last_change = self.next_change();
        let entry = TemplateEntry {
            content,
            state,
            uses: 0,
            last_change,
            failed_builds: 0,
            failed_starts: 0,
            generation: last_change,
        };
        self.entries.insert(key, entry);
    }

    /// Adds a template that an earlier daemon has built.
    pub(crate) fn insert_ready(&mut self, key: TemplateKey, content: TemplateFor, bytes: u64) {
        self.insert(key, content, TemplateState::Ready { bytes });
    }

    /// Returns the generation of the template if a pod may start from it. A missing one becomes wanted, and the pod counts as a miss.
    pub(crate) fn find(&mut self, key: &TemplateKey, content: TemplateFor, now: Instant) -> Result<u64, MissReason> {
        match self.want(key, content, now, Retry::WhenDue) {
            Some(TemplateState::Ready { .. }) => {
                let last_change = self.next_change();
                let entry = self.entries.get_mut(key);
                Ok(entry.map_or(last_change, |entry| {
                    entry.last_change = last_change;
                    entry.generation
                }))
            }
            Some(TemplateState::Failed { .. }) => Err(self.miss(MissReason::BuildFailed)),
            Some(TemplateState::Wanted | TemplateState::Building) | None => Err(self.miss(MissReason::NotBuilt)),
        }
    }

    /// Makes the template wanted if it is missing, or if its build has failed. Returns its state; `None` if too many are wanted
    /// already.
    pub(crate) fn want(
        &mut self,
        key: &TemplateKey,
        content: TemplateFor,
        now: Instant,
        retry: Retry,
    ) -> Option<TemplateState> {
        let has_room = self.count(|state| *state == TemplateState::Wanted) < MAX_WANTED;
        let last_change = self.last_change + 1;
        let Some(entry) = self.entries.get_mut(key).filter(|entry| entry.content == content) else {
            return has_room.then(|| {
                self.insert(key.clone(), content, TemplateState::Wanted);
                TemplateState::Wanted
            });
        };
        if let TemplateState::Failed { retry_at, .. } = entry.state
            && has_room
            && (retry == Retry::Now || retry_at <= now)
        {
            entry.state = TemplateState::Wanted;
            entry.last_change = last_change;
            self.last_change = last_change;
        }
        Some(self.entries.get(key)?.state.clone())
    }

    fn count(&self, is_counted: impl Fn(&TemplateState) -> bool) -> usize {
        self.entries.values().filter(|entry| is_counted(&entry.state)).count()
    }

    /// Counts a pod that does not start from a template, for this reason.
    pub(crate) fn miss(&mut self, reason: MissReason) -> MissReason {
        *self.misses.entry(reason).or_default() += 1;
        reason
    }

    /// Counts a pod that has started from the template of this generation.
    pub(crate) fn count_start(&mut self, key: &TemplateKey, generation: u64) {
        self.hits += 1;
        if let Some(entry) = self.entries.get_mut(key).filter(|entry| entry.generation == generation) {
            entry.uses += 1;
            entry.failed_starts = 0;
        }
    }

    /// Counts a pod that could not start from the template of this generation. Returns whether that is to be removed: one pod in a row may
    /// have failed for a reason of its own.
    pub(crate) fn count_failed_start(&mut self, key: &TemplateKey, generation: u64) -> bool {
        let Some(entry) = self.entries.get_mut(key).filter(|entry| entry.generation == generation) else {
            return false;
        };
        entry.failed_starts += 1;
        entry.failed_starts >= MAX_FAILED_STARTS
    }

    /// Returns the template that is to be built now: the one that is wanted for the longest time.
    pub(crate) fn begin_build(&mut self) -> Option<(TemplateKey, TemplateFor)> {
        let wanted = self.entries.iter_mut().filter(|(_, entry)| entry.state == TemplateState::Wanted);
        let (key, entry) = wanted.min_by_key(|(_, entry)| entry.last_change)?;
        entry.state = TemplateState::Building;
        Some((key.clone(), entry.content.clone()))
    }

    /// Records that a template was built, unless it was dropped meanwhile: then returns false.
    pub(crate) fn end_build(&mut self, key: &TemplateKey, bytes: u64) -> bool {
        let last_change = self.next_change();
        let Some(entry) = self.entries.get_mut(key).filter(|entry| entry.state == TemplateState::Building) else {
            return false;
        };
        entry.state = TemplateState::Ready { bytes };
        (entry.last_change, entry.generation) = (last_change, last_change);
        (entry.failed_builds, entry.failed_starts) = (0, 0);
        true
    }

    /// Records that a template could not be built. If too many have failed, the oldest failure is forgotten.
    pub(crate) fn fail_build(&mut self, key: &TemplateKey, why: String, now: Instant) {
        let last_change = self.next_change();
        let Some(entry) = self.entries.get_mut(key).filter(|entry| entry.state == TemplateState::Building) else {
            return;
        };
        let factor = 1_u32.checked_shl(entry.failed_builds).unwrap_or(u32::MAX);
        let wait = FIRST_RETRY.saturating_mul(factor).min(MAX_RETRY);
        entry.failed_builds = entry.failed_builds.saturating_add(1);
        entry.last_change = last_change;
        entry.state = TemplateState::Failed { why, retry_at: now + wait };
        let is_failed = |state: &TemplateState| matches!(state, TemplateState::Failed { .. });
        if self.count(is_failed) > MAX_FAILED {
            let failed = self.entries.iter().filter(|(_, entry)| is_failed(&entry.state));
            let oldest = failed.min_by_key(|(_, entry)| entry.last_change).map(|(key, _)| key.clone());
            oldest.map(|key| self.entries.remove(&key));
        }
    }

    /// Removes a template, if it has this generation; `None`: any. Returns whether there was one.
    pub(crate) fn remove(&mut self, key: &TemplateKey, generation: Option<u64>) -> bool {
        let fits = |entry: &TemplateEntry| generation.is_none_or(|generation| generation == entry.generation);
        self.entries.get(key).is_some_and(fits) && self.entries.remove(key).is_some()
    }

    /// Removes the templates that were not used for the longest time, until the others take at most `max` bytes; the one that was
    /// used last stays. Returns their keys.
    pub(crate) fn evict(&mut self, max: u64) -> Vec<TemplateKey> {
        let ready = self.entries.iter().filter_map(|(key, entry)| Some((entry.last_change, key, entry.bytes()?)));
        let mut ready: Vec<_> = ready.collect();
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

/// When a build that has failed is repeated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Retry {
    /// After some time.
    WhenDue,
    /// At once: someone asks for it.
    Now,
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

    fn built(catalogue: &mut TemplateCatalogue, number: u32) -> u64 {
        catalogue.want(&key(number), content(number), Instant::now(), Retry::Now);
        assert_eq!(catalogue.begin_build(), Some((key(number), content(number))));
        assert!(catalogue.end_build(&key(number), 30));
        catalogue.find(&key(number), content(number), Instant::now()).unwrap()
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
        let generation = catalogue.find(&key(1), content(1), now).unwrap();
        assert_eq!(catalogue.hits, 0, "the pod has not started yet");
        catalogue.count_start(&key(1), generation);
        assert_eq!((catalogue.hits, catalogue.misses.get(&MissReason::NotBuilt)), (1, Some(&3)));
        assert_eq!(catalogue.entries().map(|(_, entry)| entry.uses).collect::<Vec<_>>(), [1]);
        // Another template with the same key is none for this pod.
        assert_eq!(catalogue.find(&key(1), content(2), now), Err(MissReason::NotBuilt));
    }

    #[test]
    fn a_dropped_template_is_not_the_next_one() {
        let mut catalogue = TemplateCatalogue::default();
        let first = built(&mut catalogue, 1);
        assert!(catalogue.remove(&key(1), Some(first)) && !catalogue.remove(&key(1), None));
        let second = built(&mut catalogue, 1);
        assert!(!catalogue.remove(&key(1), Some(first)), "a pod of the first one has failed late");
        assert!(!catalogue.count_failed_start(&key(1), first) && !catalogue.count_failed_start(&key(1), first));
        catalogue.count_start(&key(1), first);
        assert_eq!(catalogue.entries().map(|(_, entry)| entry.uses).sum::<u64>(), 0);
        assert!(catalogue.remove(&key(1), Some(second)));
        // It may be dropped while it is built, and wanted again.
        catalogue.want(&key(1), content(1), Instant::now(), Retry::Now);
        catalogue.begin_build().unwrap();
        assert!(catalogue.remove(&key(1), None));
        assert!(!catalogue.end_build(&key(1), 30));
        catalogue.want(&key(1), content(1), Instant::now(), Retry::Now);
        assert!(!catalogue.end_build(&key(1), 30), "the build of before");
        assert!(catalogue.begin_build().is_some());
    }

    #[test]
    fn a_template_from_which_no_pod_starts_is_removed() {
        let mut catalogue = TemplateCatalogue::default();
        let generation = built(&mut catalogue, 1);
        assert!(!catalogue.count_failed_start(&key(1), generation), "a pod may fail for its own reasons");
        catalogue.count_start(&key(1), generation);
        assert!(!catalogue.count_failed_start(&key(1), generation));
        assert!(catalogue.count_failed_start(&key(1), generation));
    }

    #[test]
    fn templates_are_built_in_the_order_in_which_they_were_wanted() {
        let (mut catalogue, now) = (TemplateCatalogue::default(), Instant::now());
        for number in [3, 1, 2] {
            catalogue.want(&key(number), content(number), now, Retry::WhenDue);
        }
        let order = std::iter::from_fn(|| catalogue.begin_build()).map(|(key, _)| key).collect::<Vec<_>>();
        assert_eq!(order, [key(3), key(1), key(2)]);
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
        catalogue.fail_build(&key(1), "no kernel".into(), now);
        assert_eq!(catalogue.want(&key(1), content(1), now, Retry::Now), Some(TemplateState::Wanted));
        catalogue.begin_build().unwrap();
        catalogue.end_build(&key(1), 1);
        assert!(catalogue.find(&key(1), content(1), now).is_ok());
    }

    #[test]
    fn the_least_recently_used_templates_are_evicted() {
        let mut catalogue = TemplateCatalogue::default();
        for number in 1..=4 {
            built(&mut catalogue, number);
        }
        catalogue.find(&key(1), content(1), Instant::now()).unwrap();
        assert_eq!(catalogue.evict(120), []);
        assert_eq!(catalogue.evict(119), [key(2)]);
        assert_eq!(catalogue.evict(1), [key(3), key(4)], "the last one stays");
        assert!(catalogue.find(&key(1), content(1), Instant::now()).is_ok());
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
        assert_eq!(catalogue.entries().count(), MAX_FAILED);
        assert_eq!(
            catalogue.find(&key(999), content(999), now),
            Err(MissReason::BuildFailed),
            "the last failure counts"
        );
    }
}
