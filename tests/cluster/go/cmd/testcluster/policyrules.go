package main

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	core "k8s.io/api/core/v1"
	networking "k8s.io/api/networking/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// policyWorld is what NetworkPolicies speak of, at one moment.
type policyWorld struct {
	pods       []*core.Pod
	namespaces map[string]map[string]string // name -> labels
	policies   []*networking.NetworkPolicy
}

// ruleset returns the nftables table that enforces the policies for the pods of
// one node. Every pod has a cable of its own (CNI plugin ptp), so that all its
// traffic passes the forward hook; that of the node itself, such as the kubelet's
// probes, does not, as Kubernetes demands. An address is translated before that.
func (w *policyWorld) ruleset(table, node string) string {
	var chains, jumps strings.Builder
	for _, pod := range w.pods {
		if pod.Spec.NodeName != node || !hasOwnAddress(pod) {
			continue
		}
		in, out := w.selecting(pod, networking.PolicyTypeIngress), w.selecting(pod, networking.PolicyTypeEgress)
		address := pod.Status.PodIP
		if len(out) > 0 {
			w.writeChain(&chains, "out-"+address, "daddr", pod, out)
			fmt.Fprintf(&jumps, "    ip saddr %s jump out-%s\n", address, address)
		}
		if len(in) > 0 {
			w.writeChain(&chains, "in-"+address, "saddr", pod, in)
			fmt.Fprintf(&jumps, "    ip daddr %s jump in-%s\n", address, address)
		}
	}
	return fmt.Sprintf("table inet %s\ndelete table inet %s\ntable inet %s {\n%s"+
		"  chain forward {\n    type filter hook forward priority 0\n    ct state established,related accept\n%s  }\n}\n",
		table, table, table, chains.String(), jumps.String())
}

func hasOwnAddress(pod *core.Pod) bool {
	ended := pod.Status.Phase == core.PodSucceeded || pod.Status.Phase == core.PodFailed
	return pod.Status.PodIP != "" && !pod.Spec.HostNetwork && !ended
}

// policyRule is an ingress or egress rule; they differ in name only.
type policyRule struct {
	peers []networking.NetworkPolicyPeer
	ports []networking.NetworkPolicyPort
	home  string // namespace of the policy
}

// selecting returns the rules of the policies that isolate a pod in one direction,
// with one empty list of rules per policy that allows nothing.
func (w *policyWorld) selecting(pod *core.Pod, direction networking.PolicyType) [][]policyRule {
	var found [][]policyRule
	for _, policy := range w.policies {
		chosen := policy.Namespace == pod.Namespace && matches(&policy.Spec.PodSelector, pod.Labels)
		if !chosen || !slices.Contains(policy.Spec.PolicyTypes, direction) {
			continue
		}
		rules := []policyRule{}
		if direction == networking.PolicyTypeIngress {
			for _, rule := range policy.Spec.Ingress {
				rules = append(rules, policyRule{rule.From, rule.Ports, policy.Namespace})
			}
		} else {
			for _, rule := range policy.Spec.Egress {
				rules = append(rules, policyRule{rule.To, rule.Ports, policy.Namespace})
			}
		}
		found = append(found, rules)
	}
	return found
}

// writeChain writes the chain of one pod and direction: what a rule allows
// returns, the rest is dropped.
func (w *policyWorld) writeChain(out *strings.Builder, name, side string, pod *core.Pod, policies [][]policyRule) {
	fmt.Fprintf(out, "  chain %s {\n", name)
	for _, rules := range policies {
		for _, rule := range rules {
			named := []*core.Pod{pod} // whose container ports a port's name means
			if side == "daddr" {
				named = w.peersOf(rule)
			}
			for _, from := range w.addresses(rule, side) {
				for _, port := range ports(rule.ports, named) {
					fmt.Fprintf(out, "    %s%sreturn\n", from, port)
				}
			}
		}
	}
	fmt.Fprintf(out, "    counter drop\n  }\n")
}

// addresses returns a match per set of peers; no peers means everyone.
func (w *policyWorld) addresses(rule policyRule, side string) []string {
	if len(rule.peers) == 0 {
		return []string{""}
	}
	var found []string
	members := map[string]bool{}
	for _, pod := range w.peersOf(rule) {
		members[pod.Status.PodIP] = true
	}
	if len(members) > 0 {
		found = append(found, fmt.Sprintf("ip %s { %s } ", side, strings.Join(slices.Sorted(maps.Keys(members)), ", ")))
	}
	for _, peer := range rule.peers {
		if peer.IPBlock != nil && !strings.Contains(peer.IPBlock.CIDR, ":") {
			match := fmt.Sprintf("ip %s %s ", side, peer.IPBlock.CIDR)
			if len(peer.IPBlock.Except) > 0 {
				match += fmt.Sprintf("ip %s != { %s } ", side, strings.Join(peer.IPBlock.Except, ", "))
			}
			found = append(found, match)
		}
	}
	return found
}

// peersOf returns the pods that a rule's peers select.
func (w *policyWorld) peersOf(rule policyRule) []*core.Pod {
	var found []*core.Pod
	for _, pod := range w.pods {
		if hasOwnAddress(pod) && slices.ContainsFunc(rule.peers, func(peer networking.NetworkPolicyPeer) bool {
			return w.isPeer(peer, rule.home, pod)
		}) {
			found = append(found, pod)
		}
	}
	return found
}

func (w *policyWorld) isPeer(peer networking.NetworkPolicyPeer, home string, pod *core.Pod) bool {
	if peer.IPBlock != nil {
		return false
	}
	inNamespace := pod.Namespace == home
	if peer.NamespaceSelector != nil {
		inNamespace = matches(peer.NamespaceSelector, w.namespaces[pod.Namespace])
	}
	return inNamespace && (peer.PodSelector == nil || matches(peer.PodSelector, pod.Labels))
}

// ports returns a match per protocol and port; none given means every port.
func ports(wanted []networking.NetworkPolicyPort, named []*core.Pod) []string {
	if len(wanted) == 0 {
		return []string{""}
	}
	var found []string
	for _, port := range wanted {
		protocol := "tcp"
		if port.Protocol != nil {
			protocol = strings.ToLower(string(*port.Protocol))
		}
		switch {
		case port.Port == nil:
			found = append(found, fmt.Sprintf("meta l4proto %s ", protocol))
		case port.Port.Type == intstr.String:
			for _, number := range containerPorts(named, port.Port.StrVal) {
				found = append(found, fmt.Sprintf("%s dport %d ", protocol, number))
			}
		case port.EndPort != nil:
			found = append(found, fmt.Sprintf("%s dport %d-%d ", protocol, port.Port.IntVal, *port.EndPort))
		default:
			found = append(found, fmt.Sprintf("%s dport %d ", protocol, port.Port.IntVal))
		}
	}
	return found
}

func containerPorts(pods []*core.Pod, name string) []int32 {
	numbers := map[int32]bool{}
	for _, pod := range pods {
		for _, container := range pod.Spec.Containers {
			for _, port := range container.Ports {
				if port.Name == name {
					numbers[port.ContainerPort] = true
				}
			}
		}
	}
	return slices.Sorted(maps.Keys(numbers))
}

func matches(selector *meta.LabelSelector, set map[string]string) bool {
	compiled, err := meta.LabelSelectorAsSelector(selector)
	return err == nil && compiled.Matches(labels.Set(set))
}
