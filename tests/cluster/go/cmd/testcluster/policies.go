package main

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"log"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
)

const policyTable = "network-policies"

// policyAgent enforces NetworkPolicies on one node by an nftables table, written
// anew as a whole whenever a pod, namespace or policy changes what it says.
type policyAgent struct {
	node    string
	dns     *core.Pod
	factory informers.SharedInformerFactory
	changed chan struct{}
	applied string
}

func (a *policyAgent) world() (*policyWorld, error) {
	world := &policyWorld{namespaces: map[string]map[string]string{}}
	pods, err := a.factory.Core().V1().Pods().Lister().List(labels.Everything())
	if err != nil {
		return nil, err
	}
	namespaces, err := a.factory.Core().V1().Namespaces().Lister().List(labels.Everything())
	if err != nil {
		return nil, err
	}
	world.policies, err = a.factory.Networking().V1().NetworkPolicies().Lister().List(labels.Everything())
	if err != nil {
		return nil, err
	}
	for _, namespace := range namespaces {
		world.namespaces[namespace.Name] = namespace.Labels
	}
	world.pods = append(pods, a.dns)
	byName := func(x, y meta.Object) int {
		return cmp.Or(cmp.Compare(x.GetNamespace(), y.GetNamespace()), cmp.Compare(x.GetName(), y.GetName()))
	}
	slices.SortFunc(world.pods, func(x, y *core.Pod) int { return byName(x, y) })
	return world, nil
}

func (a *policyAgent) apply() error {
	world, err := a.world()
	if err != nil {
		return err
	}
	rules := world.ruleset(policyTable, a.node)
	if rules == a.applied {
		return nil
	}
	command := exec.Command("nft", "-f", "-")
	command.Stdin = strings.NewReader(rules)
	if output, err := command.CombinedOutput(); err != nil {
		return fmt.Errorf("nft: %w: %s\n%s", err, output, rules)
	}
	a.applied = rules
	return nil
}

// signal asks for a look; several changes are one look.
func (a *policyAgent) signal() {
	select {
	case a.changed <- struct{}{}:
	default:
	}
}

func (a *policyAgent) run(ctx context.Context) error {
	handler := cache.ResourceEventHandlerFuncs{
		AddFunc:    func(any) { a.signal() },
		UpdateFunc: func(any, any) { a.signal() },
		DeleteFunc: func(any) { a.signal() },
	}
	for _, informer := range []cache.SharedIndexInformer{
		a.factory.Core().V1().Pods().Informer(),
		a.factory.Core().V1().Namespaces().Informer(),
		a.factory.Networking().V1().NetworkPolicies().Informer(),
	} {
		if _, err := informer.AddEventHandler(handler); err != nil {
			return err
		}
	}
	a.factory.Start(ctx.Done())
	a.factory.WaitForCacheSync(ctx.Done())
	for range a.changed {
		if err := a.apply(); err != nil {
			log.Print(err)
			time.AfterFunc(time.Second, a.signal)
		}
		time.Sleep(20 * time.Millisecond) // what changes together is one look
	}
	return nil
}

func policyAgentMain() {
	flags := flag.NewFlagSet("policy-agent", flag.ExitOnError)
	kubeconfig := flags.String("kubeconfig", "", "kubeconfig")
	node := flags.String("node-name", "", "name of the node")
	dns := flags.String("dns-address", "", "address of the DNS, which is no pod here and counts as kube-system's")
	exitOn("policy-agent", flags.Parse(os.Args[1:]))
	config, err := clientcmd.BuildConfigFromFlags("", *kubeconfig)
	exitOn("policy-agent", err)
	client, err := kubernetes.NewForConfig(config)
	exitOn("policy-agent", err)
	agent := &policyAgent{
		node: *node,
		dns: &core.Pod{
			ObjectMeta: meta.ObjectMeta{
				Namespace: meta.NamespaceSystem, Name: "dns", Labels: map[string]string{"k8s-app": "kube-dns"},
			},
			Status: core.PodStatus{PodIP: *dns},
		},
		factory: informers.NewSharedInformerFactory(client, 0),
		changed: make(chan struct{}, 1),
	}
	agent.signal()
	exitOn("policy-agent", agent.run(context.Background()))
}
