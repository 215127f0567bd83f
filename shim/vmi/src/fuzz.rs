//! Contains one harness function per parser of untrusted descriptions of VMs. ci/fuzz calls them; the tests below feed them
//! random bytes and the committed corpus (`tests/corpus/TARGET/*`). A harness fails by a panic or by never ending.

use crate::admit::Admitted;
use crate::annotations::PREFIX;
use crate::cause::MAX_CAUSES;
use crate::manifest::{self, Options};
use crate::preset::Catalogue;
use crate::spec::InstanceSpec;
use crate::version::{typed, written};
use crate::{admit, complete, read};
use std::collections::BTreeMap;

/// Annotations: name, zero byte, value, zero byte, and so on. An admitted specification is valid when it is parsed again.
pub fn annotations(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let mut parts = text.split('\0');
    let mut annotations = BTreeMap::new();
    while let (Some(name), Some(value)) = (parts.next(), parts.next()) {
        annotations.insert(format!("{PREFIX}{name}"), value.to_owned());
    }
    match admit::pod(&annotations, &Catalogue::default()) {
        Ok(Some(admitted)) => {
            let (again, causes) = typed::<InstanceSpec>(written(admitted.spec()), "spec");
            assert!(causes.is_empty() && again == *admitted.spec(), "{causes}");
            for defaults in [false, true] {
                completed(&annotations, &admitted, defaults);
            }
        }
        Ok(None) => assert!(annotations.is_empty()),
        Err(causes) => assert!((1..=MAX_CAUSES).contains(&causes.list().len()) && !causes.to_string().contains('\n')),
    }
}

/// Completed annotations have the same meaning, need no catalogue, and are not completed again.
fn completed(annotations: &BTreeMap<String, String>, admitted: &Admitted, defaults: bool) {
    let catalogue = Catalogue::default();
    let Some(made) = complete::complete(annotations, &catalogue, defaults).unwrap_or_default() else { return };
    assert_eq!(complete::complete(&made, &catalogue, defaults), Ok(None), "{made:?}");
    let none = Catalogue { instancetypes: BTreeMap::new(), ..catalogue };
    let again =
        admit::pod(&made, &none).unwrap_or_else(|causes| panic!("{made:?}: {causes}")).expect("it names a document");
    assert_eq!(again.spec(), admitted.spec());
    assert_eq!((again.kind(), again.name(), again.power()), (admitted.kind(), admitted.name(), admitted.power()));
    assert_eq!((again.run_strategy(), again.ssh_keys()), (admitted.run_strategy(), admitted.ssh_keys()));
    if !defaults {
        assert_eq!(again.explicit_spec(), admitted.explicit_spec());
    }
}

/// A file of manifests is validated and converted.
pub fn manifests(data: &[u8]) {
    let Ok(documents) = read::all(&String::from_utf8_lossy(data), "file") else { return };
    let catalogue = Catalogue::default();
    assert_eq!(manifest::validate(&documents, &catalogue).len(), documents.len());
    for document in &documents {
        if let Ok(converted) = manifest::convert(document, &catalogue, &Options::default()) {
            let text = manifest::text(&converted.documents);
            assert_eq!(read::all(&text, "again").as_ref(), Ok(&converted.documents), "{text}");
        }
    }
}

/// A harness.
pub type Target = fn(&[u8]);

/// All harnesses by the names of their corpora.
pub const TARGETS: [(&str, Target); 2] = [("annotations", annotations), ("manifests", manifests)];

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_base::corpus::run_corpora;
    use proptest::prelude::*;

    #[test]
    fn the_corpus() {
        run_corpora(env!("CARGO_MANIFEST_DIR"), &TARGETS);
    }

    /// Annotations with valid names and plausible values.
    fn plausible() -> impl Strategy<Value = Vec<u8>> {
        let name = prop::sample::select(crate::annotations::ALL).prop_map(|(name, _)| name);
        let words = [
            "machine",
            "container",
            "2",
            "1Gi",
            "a",
            "a=claim:b,boot=1;c=empty:1Gi",
            "efi",
            "true",
            "Always",
            "#cloud-config",
            "{domain: {cpu: {cores: 2}}}",
            "u1.small",
            "/a/b",
            "02:00:00:00:00:01",
            "v1alpha1",
            "[]",
            "2Mi",
            "q35",
            r#"{"fields": {"spec.domain.cpu": "preset a"}, "presets": ["a"]}"#,
        ];
        let pair = (name, prop::sample::select(words.to_vec()).prop_map(str::to_owned))
            .prop_map(|(name, value)| format!("{name}\0{value}\0"));
        prop::collection::vec(pair, 0..8).prop_map(|pairs| pairs.concat().into_bytes())
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn random_annotations(data in prop_oneof![prop::collection::vec(any::<u8>(), 0..300), plausible()]) {
            annotations(&data);
        }

        #[test]
        fn manifests_with_a_flaw(at in any::<prop::sample::Index>(), byte in any::<u8>()) {
            let directory = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/manifests");
            let mut data = std::fs::read(directory.join("machine.yaml")).unwrap();
            let at = at.index(data.len());
            data[at] = byte;
            manifests(&data);
        }
    }
}
